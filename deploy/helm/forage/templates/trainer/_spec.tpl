{{/* What the trainer's Job or RayJob runs, and its name, with a digest of that: a Job is immutable and must be replaced. */}}
{{- define "forage.trainer.name" -}}
{{- $part := dict "root" . "component" "trainer" -}}
{{- $spec := include (ternary "forage.trainer.cluster" "forage.trainer.pod" (eq .Values.trainer.mode "rayjob")) $part -}}
{{- printf "%s-%s" (include "forage.part" $part) ($spec | sha256sum | trunc 8) -}}
{{- end }}

{{- define "forage.trainer.pod" -}}
metadata:
  {{- include "forage.pod.metadata" (merge (dict "lease" true) .) | nindent 2 }}
spec:
  {{- include "forage.pod" (merge (dict "lease" true) .) | nindent 2 }}
  restartPolicy: Never   # podFailurePolicy applies to pods, not to container restarts
  terminationGracePeriodSeconds: {{ .root.Values.trainer.terminationGracePeriodSeconds }}
  {{- include "forage.initContainers" . | nindent 2 }}
  containers:
    - name: trainer
      {{- include "forage.container" . | nindent 6 }}
      {{- include "forage.workingDir" . | nindent 6 }}
      {{- $processes := int .root.Values.trainer.gpu.count }}
      {{- if gt $processes 1 }}
      # torchrun, with the exit code of rank 0. Its processes have the pod's time to end.
      command:
        - python
        - -m
        - forage_trainer.launch.torchrun
        - --standalone
        - --nproc-per-node={{ $processes }}
        - --shutdown-timeout={{ .root.Values.trainer.terminationGracePeriodSeconds }}
        - -m
        - forage_trainer
      {{- else }}
      command: [python, -m, forage_trainer]
      {{- end }}
      args: [--config, /etc/forage/settings/settings.yaml]
      env:
        {{- include "forage.env" . | nindent 8 }}
      {{- include "forage.envFrom" . | nindent 6 }}
      {{- include "forage.resources" . | nindent 6 }}
      {{- include "forage.containerPorts" . | nindent 6 }}
      {{- include "forage.probes" (dict "root" .root "port" "health" "startup" 300) | nindent 6 }}
      volumeMounts:
        {{- include "forage.mounts" . | nindent 8 }}
  volumes:
    {{- include "forage.volumes" . | nindent 4 }}
{{- end }}

{{- define "forage.trainer.cluster" -}}
{{- $trainer := .root.Values.trainer -}}
{{- $workers := dict "replicas" $trainer.nodes "minReplicas" $trainer.nodes "maxReplicas" $trainer.nodes -}}
{{- $more := dict "head" $trainer.rayjob.head "workers" $workers "graceSeconds" $trainer.terminationGracePeriodSeconds "lease" true -}}
{{- include "forage.ray.cluster" (merge $more .) -}}
{{- end }}
