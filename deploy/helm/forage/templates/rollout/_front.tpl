{{/* A driver must run on a cluster node: the head. It shares its sockets (/tmp/ray) and object store (/dev/shm). */}}
{{- define "forage.rollout.front" -}}
- name: front
  {{- include "forage.container" . | nindent 2 }}
  {{- include "forage.workingDir" . | nindent 2 }}
  command: [python, -m, forage_rollout, --config, /etc/forage/settings/settings.yaml]
  args: [rollout.ray_address=auto, rollout.use_existing_app=true]
  env:
    {{- include "forage.env" . | nindent 4 }}
    - {name: RAY_AUTH_MODE, value: token}
    - name: RAY_AUTH_TOKEN
      valueFrom: {secretKeyRef: {name: {{ include "forage.ray.secret" .root }}, key: auth_token}}
    {{- include "forage.ray.tls.env" .root | nindent 4 }}
  resources:
    {{- toYaml .root.Values.rollout.rayservice.front.resources | nindent 4 }}
  {{- include "forage.containerPorts" . | nindent 2 }}
  # It runs in the head's pod, which the operator requires to be ready before it starts the workers that this waits for.
  {{- include "forage.probes" (dict "root" .root "port" "health" "startup" 300 "ready" "/healthz") | nindent 2 }}
  volumeMounts:
    {{- include "forage.mounts" . | nindent 4 }}
    {{- include "forage.ray.mount" . | nindent 4 }}
    {{- include "forage.ray.tls.mount" .root | nindent 4 }}
{{- end }}
