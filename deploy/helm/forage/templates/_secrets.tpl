{{/* Secrets: an existing one, or one generated at the first install and reused (`lookup`) by upgrades. */}}

{{- define "forage.redis.secret" -}}
{{- if .Values.redis.enabled -}}
{{- default (printf "%s-redis" (include "forage.fullname" .)) .Values.redis.auth.existingSecret -}}
{{- else -}}
{{- .Values.redis.external.existingSecret -}}
{{- end -}}
{{- end }}

{{- define "forage.console.secret" -}}
{{- default (printf "%s-console-token" (include "forage.fullname" .)) .Values.console.auth.existingSecret -}}
{{- end }}

{{- define "forage.ray.secret" -}}
{{- default (printf "%s-ray" (include "forage.fullname" .)) .Values.ray.auth.existingSecret -}}
{{- end }}

{{/* Users of Redis with a password: `forage redis acl` says what each may do. */}}
{{- define "forage.redis.users" -}}
{{- range $role := list "trainer" "rollout" "cli" "console" "exporter" "keda" "admin" }} forage-{{ $role }}{{ end -}}
{{- end }}

{{/* (dict "root" $ "name" … "keys" (list …) "component" …) */}}
{{- define "forage.secret" -}}
{{- $existing := default dict (lookup "v1" "Secret" .root.Release.Namespace .name) -}}
apiVersion: v1
kind: Secret
metadata:
  name: {{ .name }}
  namespace: {{ .root.Release.Namespace }}
  labels:
    {{- include "forage.labels" . | nindent 4 }}
  annotations:
    helm.sh/resource-policy: keep   # a new install after an uninstall finds it
type: Opaque
data:
  {{- range default (list .key) .keys }}
  {{ . }}: {{ default (randAlphaNum 40 | b64enc) (index (default dict $existing.data) .) }}
  {{- end }}
{{- end }}
