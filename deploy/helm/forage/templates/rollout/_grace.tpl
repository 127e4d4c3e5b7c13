{{/* The drain, 15 s for the end of all processes, and the moment before. */}}
{{- define "forage.rollout.grace" -}}
{{- add 20 (dig "rollout" "drain_timeout_s" 5 .Values.settings | float64 | ceil | int) -}}
{{- end }}
