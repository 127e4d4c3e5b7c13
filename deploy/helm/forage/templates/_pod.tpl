{{/* Common fields of pods and containers. A `part` is (dict "root" $ "component" "retriever"). */}}

{{/* Pod fields of the `restricted` profile, and scheduling. (… "place" .Values.… takes scheduling from another part) */}}
{{- define "forage.pod" -}}
{{- $place := default (index .root.Values .component) .place -}}
serviceAccountName: {{ include "forage.part" . }}
automountServiceAccountToken: {{ default false .apiAccess }}
enableServiceLinks: false
{{ include "forage.pod.security" .root }}
{{- with .root.Values.image.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
{{- $values := index .root.Values .component }}
{{- with $values.schedulerName }}
schedulerName: {{ . }}
{{- end }}
{{- if $values.hostNetwork }}
hostNetwork: true
dnsPolicy: ClusterFirstWithHostNet
{{- end }}
{{- if and $values.resourceClaims (not .place) }}
resourceClaims:
  {{- toYaml $values.resourceClaims | nindent 2 }}
{{- end }}
{{- with $place.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $place.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with include "forage.affinity" . }}
affinity:
  {{- . | nindent 2 }}
{{- end }}
{{- with $values.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with $place.runtimeClassName }}
runtimeClassName: {{ . }}
{{- end }}
{{- end }}

{{/*
A part's affinity. With … "lease" true the scheduler starts none of these pods while another of the release exists, on any
node: two trainers cannot run, whatever Jobs an upgrade leaves.
*/}}
{{- define "forage.affinity" -}}
{{- $affinity := deepCopy (default (index .root.Values .component) .place).affinity -}}
{{- if .lease }}
{{- $term := dict "topologyKey" "kubernetes.io/os" "labelSelector" (dict "matchLabels" (include "forage.lease" . | fromYaml)) }}
{{- $anti := default dict $affinity.podAntiAffinity }}
{{- $required := append (default list $anti.requiredDuringSchedulingIgnoredDuringExecution) $term }}
{{- $_ := set $anti "requiredDuringSchedulingIgnoredDuringExecution" $required }}
{{- $_ := set $affinity "podAntiAffinity" $anti }}
{{- end }}
{{- with $affinity }}{{ toYaml . }}{{ end }}
{{- end }}

{{- define "forage.lease" -}}
forage/lease: {{ include "forage.part" . }}
{{- end }}

{{- define "forage.pod.security" -}}
securityContext:
  runAsNonRoot: true
  runAsUser: {{ .Values.security.runAsUser }}
  runAsGroup: {{ .Values.security.runAsGroup }}
  fsGroup: {{ .Values.security.fsGroup }}
  fsGroupChangePolicy: OnRootMismatch   # otherwise every start walks a large volume
  seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- define "forage.container.security" -}}
{{- $security := dict "allowPrivilegeEscalation" false "privileged" false "readOnlyRootFilesystem" true "runAsNonRoot" true }}
{{- $_ := set $security "capabilities" (dict "drop" (list "ALL")) }}
{{- $_ := set $security "seccompProfile" (dict "type" "RuntimeDefault") }}
{{- $own := default dict (index .root.Values (default "" .component)) }}
securityContext:
  {{- mergeOverwrite $security (deepCopy (default dict $own.securityContext)) | toYaml | nindent 2 }}
{{- end }}

{{/* image, pull policy and security of a container, as for forage.image */}}
{{- define "forage.container" -}}
image: {{ include "forage.image" . }}
imagePullPolicy: {{ .root.Values.image.pullPolicy }}
{{ include "forage.container.security" . }}
{{- end }}

{{/*
Requests and limits of a part's main container, with its GPUs, which Kubernetes requires in the limits; or (… "of" resources)
of another one. A retriever's files in memory count towards the container that copies them and the one that serves them.
*/}}
{{- define "forage.resources" -}}
{{- $values := index .root.Values .component -}}
{{- $resources := deepCopy (default $values.resources .of) -}}
{{- if and (not .of) $values.gpu $values.gpu.count $values.gpu.resource -}}
{{- $_ := set $resources "limits" (merge (dict $values.gpu.resource $values.gpu.count) $resources.limits) -}}
{{- end -}}
{{- if and (not .of) $values.resourceClaims -}}
{{- $claims := list -}}
{{- range $values.resourceClaims }}{{ $claims = append $claims (pick . "name") }}{{ end -}}
{{- $_ := set $resources "claims" $claims -}}
{{- end -}}
{{- if eq "memory" (dig "data" "kind" "" $values) -}}
{{- range $amounts := pick $resources "requests" "limits" -}}
{{- if $amounts.memory -}}
{{- $_ := set $amounts "memory" (add (include "forage.bytes" $amounts.memory) (include "forage.bytes" $values.data.size)) -}}
{{- end -}}
{{- end -}}
{{- end -}}
resources:
  {{- toYaml $resources | nindent 2 }}
{{- end }}

{{/* The replicas of a Deployment; with … "scaled" true those that it has, because leaving them out would set them to 1. */}}
{{- define "forage.replicas" -}}
{{- if not .scaled -}}
replicas: {{ (index .root.Values .component).replicas }}
{{- else -}}
{{- with lookup "apps/v1" "Deployment" .root.Release.Namespace (include "forage.part" .) -}}
replicas: {{ .spec.replicas }}
{{- end -}}
{{- end -}}
{{- end }}

{{/* Spreads the replicas of a part over nodes and zones. */}}
{{- define "forage.spread" -}}
{{- $values := index .root.Values .component -}}
{{- if $values.topologySpread.enabled -}}
topologySpreadConstraints:
  {{- range $key := list "topology.kubernetes.io/zone" "kubernetes.io/hostname" }}
  - topologyKey: {{ $key }}
    maxSkew: 1
    whenUnsatisfiable: {{ $values.topologySpread.whenUnsatisfiable }}
    labelSelector:
      matchLabels:
        {{- include "forage.selector" $ | nindent 8 }}
    matchLabelKeys: [pod-template-hash]   # ignores old pods of a rolling update
  {{- end }}
{{- end }}
{{- end }}

{{/* Metadata of a pod template: labels, and checksums whose change restarts the pod. */}}
{{- define "forage.pod.metadata" -}}
{{- $annotations := deepCopy (index .root.Values .component).podAnnotations -}}
{{- if ne .component "redis" }}
{{- $_ := set $annotations "checksum/settings" (include "forage.settings.checksum" .) }}
{{- else }}
{{- $files := "" }}
{{- range $path, $content := .root.Files.Glob "files/redis/*" }}{{ $files = printf "%s%s" $files $content }}{{ end }}
{{- $_ := set $annotations "checksum/start" (sha256sum $files) }}
{{- end -}}
labels:
  {{- with omit (index .root.Values .component).podLabels "app.kubernetes.io/instance" "app.kubernetes.io/component" }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
  {{- include "forage.selector" . | nindent 2 }}
  {{- if .lease }}
  {{- include "forage.lease" . | nindent 2 }}
  {{- end }}
{{- with $annotations }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{/* The host of an address that services listen on */}}
{{- define "forage.listenHost" -}}
{{ ternary (printf "[%s]" .Values.listenHost) .Values.listenHost (contains ":" .Values.listenHost) }}
{{- end }}

{{/* Environment of a service. It listens on listenHost; the settings file has its DNS names for clients. */}}
{{- define "forage.env" -}}
{{- $threads := default dict (index .root.Values.settings .component) -}}
- {name: HOME, value: /tmp}
- {name: USER, value: forage}   # torch needs a user name, and the images have none for this uid
- {name: PYTHONUNBUFFERED, value: "1"}
- {name: PYTHONSAFEPATH, value: "1"}   # no module is imported from the volume, which is the working directory
- {name: TOKENIZERS_PARALLELISM, value: "false"}
- {name: HF_HUB_OFFLINE, value: "1"}
- {name: OMP_WAIT_POLICY, value: PASSIVE}   # spinning idle threads make an update ten times slower
- {name: OMP_NUM_THREADS, value: {{ default (ternary 2 1 (eq .component "trainer")) $threads.threads | quote }}}
{{- range $port, $number := index (include "forage.ports" .root | fromYaml) .component }}
- {name: FORAGE__{{ upper $.component }}__{{ upper $port }}_ADDRESS, value: "{{ include "forage.listenHost" $.root }}:{{ $number }}"}
{{- end }}
{{- if has .component (list "rollout" "trainer" "console") }}
{{ include "forage.redis.env" . }}
{{- end }}
{{- if has .component (list "rollout" "trainer" "console") }}
{{- with .root.Values.objectStore.env }}
{{ toYaml . }}
{{- end }}
{{- end }}
{{- with (index .root.Values .component).extraEnv }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* A part's user of Redis. Its password is in a file, which the kubelet updates. */}}
{{- define "forage.redis.env" -}}
{{- if include "forage.redis.secret" .root -}}
- {name: FORAGE__REDIS__USERNAME, value: forage-{{ .component }}}
- {name: FORAGE__REDIS__PASSWORD_FILE, value: /etc/forage/redis/password}
{{- end }}
{{- if and (eq .component "rollout") .root.Values.rollout.keda.enabled .root.Values.redis.enabled }}
- {name: KEDA_REDIS_USERNAME, value: forage-keda}   # the scaler reads it from the pods that it scales
{{- end }}
{{- end }}

{{- define "forage.envFrom" -}}
{{- if has .component (list "rollout" "trainer" "console") }}
{{- with .root.Values.objectStore.existingSecret }}
envFrom:
  - secretRef: {name: {{ . }}}
{{- end }}
{{- end }}
{{- end }}

{{/* Volumes and mounts of your own. */}}
{{- define "forage.extraMounts" -}}
{{- with (index .root.Values .component).extraVolumeMounts }}
{{ toYaml . }}
{{- end }}
{{- end }}
{{- define "forage.extraVolumes" -}}
{{- with (index .root.Values .component).extraVolumes }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* Volume mounts of a part. The root file system is read-only; /tmp and /cache are the pod's own. */}}
{{- define "forage.mounts" -}}
- {name: settings, mountPath: /etc/forage/settings, readOnly: true}
- {name: tmp, mountPath: /tmp}
- {name: cache, mountPath: /cache}
{{- if has .component (list "rollout" "trainer") }}
- {name: shm, mountPath: /dev/shm}
{{- end }}
{{- if ne .component "reward" }}
- {name: data, mountPath: /data}
{{- end }}
{{- include "forage.auth.mounts" . }}
{{- include "forage.extraMounts" . }}
{{- if and (has .component (list "rollout" "trainer")) .root.Values.signing.existingSecret }}
- {name: signing, mountPath: /etc/forage/signing, readOnly: true}
{{- end }}
{{- if and (has .component (list "rollout" "trainer" "console")) (include "forage.redis.secret" .root) }}
- {name: redis-password, mountPath: /etc/forage/redis, readOnly: true}
{{- end }}
{{- if eq .component "console" }}
- {name: console-token, mountPath: /etc/forage/console-token, readOnly: true}
{{- end }}
{{- end }}

{{- define "forage.volumes" -}}
- name: settings
  configMap: {name: {{ include "forage.fullname" .root }}-settings}
- name: tmp
  emptyDir: {}
- name: cache
  emptyDir: {}
{{- if has .component (list "rollout" "trainer") }}
- name: shm
  emptyDir: {medium: Memory, sizeLimit: {{ (index .root.Values .component).shmSize }}}
{{- end }}
{{- if eq .component "retriever" }}
{{ include "forage.retriever.volume" .root }}
{{- else if ne .component "reward" }}
- name: data
  persistentVolumeClaim: {claimName: {{ include "forage.shared.claim" .root }}}
{{- end }}
{{- include "forage.auth.volumes" . }}
{{- include "forage.extraVolumes" . }}
{{- if and (has .component (list "rollout" "trainer")) .root.Values.signing.existingSecret }}
- name: signing
  secret:
    secretName: {{ .root.Values.signing.existingSecret }}
    defaultMode: 0440
    items:
      - {key: verify-key.pem, path: verify-key.pem}
      {{- if eq .component "trainer" }}
      - {key: signing-key.pem, path: signing-key.pem}
      {{- end }}
{{- end }}
{{- if and (has .component (list "rollout" "trainer" "console")) (include "forage.redis.secret" .root) }}
- name: redis-password
  secret:
    secretName: {{ include "forage.redis.secret" .root }}
    items: [{key: forage-{{ .component }}, path: password}]
    defaultMode: 0440
{{- end }}
{{- if eq .component "console" }}
- name: console-token
  secret: {secretName: {{ include "forage.console.secret" .root }}, defaultMode: 0440}
{{- end }}
{{- if include "forage.fetches" . }}
- name: fetch
  configMap: {name: {{ include "forage.fullname" .root }}-fetch}
{{- end }}
{{- end }}

{{/* HTTP probes of a part that has /healthz and /readyz: (… "root" $ "port" "health" "startup" 60) seconds for the start. */}}
{{- define "forage.probes" -}}
startupProbe:
  httpGet: {path: /healthz, port: {{ .port }}, scheme: {{ include "forage.tls.scheme" .root }}}
  periodSeconds: 2
  timeoutSeconds: 5
  failureThreshold: {{ div .startup 2 }}
{{ include "forage.probes.running" . }}
{{- end }}

{{/* Liveness is patient, because a busy process is not dead. Readiness is /readyz (or … "ready" path). */}}
{{- define "forage.probes.running" -}}
livenessProbe:
  httpGet: {path: /healthz, port: {{ .port }}, scheme: {{ include "forage.tls.scheme" .root }}}
  periodSeconds: 10
  timeoutSeconds: 10
  failureThreshold: 6
readinessProbe:
  httpGet: {path: {{ default "/readyz" .ready }}, port: {{ .port }}, scheme: {{ include "forage.tls.scheme" .root }}}
  periodSeconds: 5
  timeoutSeconds: 5
  failureThreshold: 2
{{- end }}

{{/* Endpoints need a moment to remove a pod before it drains. */}}
{{- define "forage.preStop" -}}
lifecycle:
  preStop: {sleep: {seconds: 5}}
{{- end }}

{{/* Named ports of a part's container. */}}
{{- define "forage.containerPorts" -}}
ports:
  {{- range $port, $number := index (include "forage.ports" .root | fromYaml) .component }}
  - {name: {{ $port }}, containerPort: {{ $number }}}
  {{- end }}
{{- end }}

{{/* Limits the evictions of a part's pods while nodes are drained. */}}
{{- define "forage.pdb" -}}
{{- $values := index .root.Values .component -}}
{{- if $values.pdb.enabled }}
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata:
  {{- include "forage.metadata" . | nindent 2 }}
spec:
  maxUnavailable: {{ $values.pdb.maxUnavailable }}
  unhealthyPodEvictionPolicy: AlwaysAllow   # a pod that is not ready must not block a node drain
  selector:
    matchLabels:
      {{- include "forage.selector" . | nindent 6 }}
{{- end }}
{{- end }}

{{- define "forage.hpa" -}}
{{- $scaling := (index .root.Values .component).autoscaling -}}
{{- if $scaling.enabled }}
apiVersion: autoscaling/v2
kind: HorizontalPodAutoscaler
metadata:
  {{- include "forage.metadata" . | nindent 2 }}
spec:
  scaleTargetRef: {apiVersion: apps/v1, kind: Deployment, name: {{ include "forage.part" . }}}
  minReplicas: {{ $scaling.minReplicas }}
  maxReplicas: {{ $scaling.maxReplicas }}
  metrics:
    - type: Resource
      resource: {name: cpu, target: {type: Utilization, averageUtilization: {{ $scaling.targetCPUUtilization }}}}
  behavior:
    scaleDown: {stabilizationWindowSeconds: 300}   # the load comes in waves, one per training step
{{- end }}
{{- end }}

{{/* Scales the retriever by the queries that wait, and by CPU. */}}
{{- define "forage.retriever.keda" -}}
{{- $scaling := .root.Values.retriever.autoscaling -}}
{{- if $scaling.enabled }}
apiVersion: keda.sh/v1alpha1
kind: ScaledObject
metadata:
  {{- include "forage.metadata" . | nindent 2 }}
spec:
  scaleTargetRef: {apiVersion: apps/v1, kind: Deployment, name: {{ include "forage.part" . }}}
  minReplicaCount: {{ $scaling.minReplicas }}
  maxReplicaCount: {{ $scaling.maxReplicas }}
  advanced:
    horizontalPodAutoscalerConfig:
      behavior:
        scaleDown: {stabilizationWindowSeconds: 300}   # the load comes in waves, one per training step
  triggers:
    - type: prometheus
      metadata:
        serverAddress: {{ $scaling.prometheusAddress }}
        query: sum(avg_over_time(forage_retriever_waiting_queries{namespace="{{ .root.Release.Namespace }}"}[1m]))
        threshold: {{ $scaling.waitingPerReplica | quote }}
    - type: cpu
      metricType: Utilization
      metadata: {value: {{ $scaling.targetCPUUtilization | quote }}}
{{- end }}
{{- end }}

{{- define "forage.serviceAccount" -}}
apiVersion: v1
kind: ServiceAccount
metadata:
  {{- include "forage.metadata" . | nindent 2 }}
  {{- with (index .root.Values .component).serviceAccountAnnotations }}
  annotations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
automountServiceAccountToken: false
{{- end }}

{{/* A Service with all ports of a part: (… "headless" true "notReady" true "extraSelector" (dict …)) */}}
{{- define "forage.service" -}}
apiVersion: v1
kind: Service
metadata:
  {{- include "forage.metadata" . | nindent 2 }}
spec:
  {{- if .headless }}
  clusterIP: None
  {{- end }}
  {{- if .notReady }}
  publishNotReadyAddresses: true   # also scrape pods that are not ready
  {{- end }}
  selector:
    {{- include "forage.selector" . | nindent 4 }}
    {{- with .extraSelector }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  ports:
    {{- range $port, $number := index (include "forage.ports" .root | fromYaml) .component }}
    - name: {{ $port }}
      port: {{ $number }}
      targetPort: {{ $port }}
      {{- if $.root.Values.tls.enabled }}
      appProtocol: https
      {{- else if eq $port "grpc" }}
      appProtocol: kubernetes.io/h2c
      {{- end }}
    {{- end }}
{{- end }}
