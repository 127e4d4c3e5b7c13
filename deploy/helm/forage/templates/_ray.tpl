{{/*
A Ray cluster as KubeRay's rayClusterConfig (or rayClusterSpec): a head for Ray's control processes, and one group of
worker nodes, each with the resources of the part.
  (dict "root" $ "component" "rollout" "head" (values) "workers" (replicas, minReplicas, maxReplicas) "sidecars" "…")
*/}}
{{- define "forage.ray.cluster" -}}
{{- $autoscales := gt (int .workers.maxReplicas) (int .workers.minReplicas) -}}
rayVersion: {{ .root.Values.ray.version | quote }}
authOptions: {mode: token, secretName: {{ include "forage.ray.secret" .root }}}
enableInTreeAutoscaling: {{ $autoscales }}
{{- if $autoscales }}
autoscalerOptions:
  idleTimeoutSeconds: {{ .idleTimeoutSeconds }}
  {{- with include "forage.ray.tls.env" .root }}
  env:
    {{- . | nindent 4 }}
  {{- end }}
  {{- include "forage.container.security" (omit . "component") | nindent 2 }}
  resources:
    {{- toYaml .root.Values.ray.autoscaler.resources | nindent 4 }}
  volumeMounts:
    {{- include "forage.ray.mount" . | nindent 4 }}
    {{- include "forage.ray.tls.mount" .root | nindent 4 }}
{{- end }}
headGroupSpec:
  rayStartParams:
    dashboard-host: {{ .root.Values.listenHost | quote }}   # for submissions by the operator
    num-cpus: "0"             # the head runs no tasks
    disable-usage-stats: "true"
  template:
    metadata:
      {{- include "forage.pod.metadata" . | nindent 6 }}
    spec:
      {{- include "forage.pod" (merge (dict "place" .head "apiAccess" $autoscales) .) | nindent 6 }}
      terminationGracePeriodSeconds: {{ .graceSeconds }}
      {{- if .sidecars }}
      shareProcessNamespace: true   # Ray identifies a driver by its process id
      {{- end }}
      {{- include "forage.ray.initContainers" . | nindent 6 }}
      containers:
        - name: ray-head
          {{- include "forage.ray.container" . | nindent 10 }}
          resources:
            {{- toYaml .head.resources | nindent 12 }}
          ports:
            - {name: gcs, containerPort: 6379}
            - {name: dashboard, containerPort: 8265}
            - {name: client, containerPort: 10001}
            - {name: ray-metrics, containerPort: 8080}
          {{- include "forage.ray.probes" (dict "port" 8265 "path" "/api/gcs_healthz") | nindent 10 }}
        {{- with .sidecars }}
        {{- . | nindent 8 }}
        {{- end }}
      volumes:
        {{- include "forage.volumes" . | nindent 8 }}
        {{- include "forage.ray.tls.volumes" .root | nindent 8 }}
        - name: ray-logs
          emptyDir: {}
workerGroupSpecs:
  - groupName: nodes
    replicas: {{ .workers.replicas }}
    minReplicas: {{ .workers.minReplicas }}
    maxReplicas: {{ .workers.maxReplicas }}
    rayStartParams: {}
    template:
      metadata:
        {{- include "forage.pod.metadata" (omit . "lease") | nindent 8 }}
      spec:
        {{- include "forage.pod" (omit . "lease") | nindent 8 }}
        terminationGracePeriodSeconds: {{ .graceSeconds }}
        {{- include "forage.ray.initContainers" . | nindent 8 }}
        containers:
          - name: ray-worker
            {{- include "forage.ray.container" . | nindent 12 }}
            {{- include "forage.resources" . | nindent 12 }}
            ports:
              - {name: ray-metrics, containerPort: 8080}
              {{- if eq .component "trainer" }}
              - {name: health, containerPort: {{ (include "forage.ports" .root | fromYaml).trainer.health }}}   # only rank 0 serves it
              {{- end }}
            lifecycle:
              preStop: {exec: {command: [ray, stop]}}
            {{- include "forage.ray.probes" (dict "port" 52365 "path" "/api/local_raylet_healthz") | nindent 12 }}
        volumes:
          {{- include "forage.volumes" . | nindent 10 }}
          {{- include "forage.ray.tls.volumes" .root | nindent 10 }}
          - name: ray-logs
            emptyDir: {}
{{- end }}

{{- define "forage.ray.container" -}}
{{- include "forage.container" . }}
{{ include "forage.workingDir" . }}
env:
  {{- include "forage.env" . | nindent 2 }}
  {{- include "forage.ray.env" . | nindent 2 }}
  {{- include "forage.ray.tls.env" .root | nindent 2 }}
envFrom:
  - configMapRef: {name: {{ include "forage.fullname" .root }}-settings-env}
  {{- with .root.Values.objectStore.existingSecret }}
  - secretRef: {name: {{ . }}}
  {{- end }}
volumeMounts:
  {{- include "forage.mounts" . | nindent 2 }}
  {{- include "forage.ray.mount" . | nindent 2 }}
  {{- include "forage.ray.tls.mount" .root | nindent 2 }}
{{- end }}

{{/* Sockets and logs, under the name that the operator uses for its autoscaler. */}}
{{- define "forage.ray.mount" -}}
- {name: ray-logs, mountPath: /tmp/ray}
{{- end }}

{{/* As forage_rollout/deployments/cluster.py and vllm_start/vllm_args.py set it for their own Ray; replicas read it. */}}
{{- define "forage.ray.env" -}}
- {name: RAY_USAGE_STATS_ENABLED, value: "0"}
{{- if eq .component "rollout" }}
- {name: RAY_SERVE_LOG_TO_STDERR, value: "1"}
- {name: RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH, value: "268435456"}
- {name: RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP, value: "0"}
- {name: RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD, value: "0"}
- {name: HF_HUB_DISABLE_PROGRESS_BARS, value: "1"}
- {name: TQDM_DISABLE, value: "1"}
- {name: VLLM_CPU_KVCACHE_SPACE, value: {{ max 1 (round (dig "engine" "kv_cache_gib" 1 (default dict .root.Values.settings.rollout)) 0 | int) | quote }}}
- {name: VLLM_ENABLE_V1_MULTIPROCESSING, value: "0"}
- {name: VLLM_LOGGING_LEVEL, value: ERROR}
- {name: VLLM_NO_USAGE_STATS, value: "1"}
{{- end }}
{{- end }}

{{/* Replaces the operator's worker probes, which call Serve's HTTP proxy: there is none. */}}
{{- define "forage.ray.probes" -}}
startupProbe:
  httpGet: {path: {{ .path }}, port: {{ .port }}}
  periodSeconds: 5
  timeoutSeconds: 5
  failureThreshold: 60
livenessProbe:
  httpGet: {path: /api/local_raylet_healthz, port: 52365}
  periodSeconds: 10
  timeoutSeconds: 10
  failureThreshold: 12
readinessProbe:
  httpGet: {path: {{ .path }}, port: {{ .port }}}
  periodSeconds: 5
  timeoutSeconds: 5
  failureThreshold: 3
{{- end }}

{{/* TLS between Ray's processes. A node signs its own certificate, because Ray connects to addresses of pods. */}}
{{- define "forage.ray.ca" -}}
{{- default (printf "%s-ray-ca" (include "forage.fullname" .)) .Values.ray.tls.existingSecret -}}
{{- end }}

{{- define "forage.ray.tls.env" -}}
{{- if .Values.ray.tls.enabled -}}
- {name: RAY_USE_TLS, value: "1"}
- {name: RAY_TLS_SERVER_CERT, value: /etc/forage/ray-tls/node.pem}
- {name: RAY_TLS_SERVER_KEY, value: /etc/forage/ray-tls/node.key}
- {name: RAY_TLS_CA_CERT, value: /etc/forage/ray-tls/ca.pem}
{{- end }}
{{- end }}

{{- define "forage.ray.tls.mount" -}}
{{- if .Values.ray.tls.enabled -}}
- {name: ray-tls, mountPath: /etc/forage/ray-tls}
{{- end }}
{{- end }}

{{- define "forage.ray.tls.volumes" -}}
{{- if .Values.ray.tls.enabled -}}
- name: ray-tls
  emptyDir: {medium: Memory, sizeLimit: 1Mi}
- name: ray-ca
  secret: {secretName: {{ include "forage.ray.ca" . }}, defaultMode: 0440}
{{- end }}
{{- end }}

{{/* The init containers of a node: the certificate first, because the operator's own, which waits for the head, needs it. */}}
{{- define "forage.ray.initContainers" -}}
{{- $others := include "forage.initContainers" . | fromYaml -}}
{{- $all := list -}}
{{- if .root.Values.ray.tls.enabled }}{{ $all = append $all (include "forage.ray.certificate" . | fromYaml) }}{{ end -}}
{{- with concat $all (default list $others.initContainers) }}
initContainers:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{- define "forage.ray.certificate" -}}
name: ray-certificate
{{ include "forage.container" . }}
command: [python, -c]
args:
  - |
    import os, pathlib, shutil
    from forage_runtime.security.certificates import Authority, issue_certificate
    source, target = pathlib.Path("/etc/forage/ray-ca"), pathlib.Path("/etc/forage/ray-tls")
    shutil.copyfile(source / "ca.crt", target / "ca.pem")
    hosts = ["localhost", "127.0.0.1", os.environ["POD_IP"], *filter(None, [os.environ.get("FQ_RAY_IP")])]
    issue_certificate(Authority(source / "ca.crt", source / "ca.key"), target, "node", hosts, valid_days=3650)
env:
  - {name: HOME, value: /tmp}
  - name: POD_IP
    valueFrom: {fieldRef: {fieldPath: status.podIP}}
resources:
  {{- toYaml .root.Values.ray.submitter.resources | nindent 2 }}
volumeMounts:
  - {name: ray-ca, mountPath: /etc/forage/ray-ca, readOnly: true}
  - {name: ray-tls, mountPath: /etc/forage/ray-tls}
  - {name: tmp, mountPath: /tmp}
{{- end }}
