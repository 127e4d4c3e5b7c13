{{/* The drain, 15 s for all processes to exit, and the delay before the drain. */}}
{{- define "forage.rollout.grace" -}}
{{- add 20 (dig "rollout" "drain_timeout_s" 5 .Values.settings | float64 | ceil | int) -}}
{{- end }}
