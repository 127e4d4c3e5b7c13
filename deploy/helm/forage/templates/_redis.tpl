{{/* The maxmemory of Redis: as set, else three quarters of the container's limit; 0 = none. The rest is for buffers and
     for the rewrite of the append-only file. */}}
{{- define "forage.redis.maxmemory" -}}
{{- $limit := dig "limits" "memory" "" .Values.redis.resources -}}
{{- if .Values.redis.maxmemory -}}
{{ .Values.redis.maxmemory }}
{{- else if $limit -}}
{{ include "forage.bytes" $limit | float64 | mulf 0.75 | int64 }}
{{- else -}}
0
{{- end -}}
{{- end }}

{{/* The bytes of a quantity: 2Gi, 1.5G, 500M or a number */}}
{{- define "forage.bytes" -}}
{{- if kindIs "string" . -}}
{{- $factors := dict "" 1 "k" 1e3 "M" 1e6 "G" 1e9 "T" 1e12 "Ki" 1024 "Mi" 1048576 "Gi" 1073741824 "Ti" 1099511627776 -}}
{{- $unit := regexReplaceAll "^[0-9.]+" . "" -}}
{{- if not (hasKey $factors $unit) }}{{ fail (printf "%s is not a quantity of memory: give for example 2Gi" .) }}{{ end -}}
{{ mulf (float64 (trimSuffix $unit .)) (float64 (get $factors $unit)) | int64 }}
{{- else -}}
{{ int64 . }}
{{- end -}}
{{- end }}
