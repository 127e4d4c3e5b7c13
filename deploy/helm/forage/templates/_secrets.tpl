{{/* Secrets: an existing one, or one generated at the first install and reused (`lookup`) by upgrades. */}}

{{- define "forage.redis.secret" -}}
{{- default (printf "%s-redis" (include "forage.fullname" .)) .Values.redis.auth.existingSecret -}}
{{- end }}

{{- define "forage.console.secret" -}}
{{- default (printf "%s-console-token" (include "forage.fullname" .)) .Values.console.auth.existingSecret -}}
{{- end }}

{{- define "forage.ray.secret" -}}
{{- default (printf "%s-ray" (include "forage.fullname" .)) .Values.ray.auth.existingSecret -}}
{{- end }}

{{/* (dict "root" $ "name" … "key" … "component" …) */}}
{{- define "forage.secret" -}}
{{- $existing := default dict (lookup "v1" "Secret" .root.Release.Namespace .name) -}}
{{- $value := index (default dict $existing.data) .key -}}
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
  {{ .key }}: {{ default (randAlphaNum 40 | b64enc) $value }}
{{- end }}
