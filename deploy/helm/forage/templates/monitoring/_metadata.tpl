{{/* With the labels by which a Prometheus operator or a Grafana finds what is its. */}}
{{- define "forage.monitoring.metadata" -}}
{{- $metadata := include "forage.metadata" . | fromYaml -}}
{{- $_ := set $metadata "labels" (merge (deepCopy .root.Values.monitoring.labels) (default dict .labels) $metadata.labels) -}}
{{- toYaml $metadata -}}
{{- end }}
