{{/* Checks that the schema cannot express. Each message states the error and the remedy. */}}
{{- define "forage.validate" -}}
{{- $values := .Values -}}
{{- $settings := $values.settings -}}
{{- $components := include "forage.components" . | fromYamlArray -}}

{{- range $component, $ports := omit (include "forage.ports" . | fromYaml) "redis" }}
{{- $section := default dict (index $settings $component) }}
{{- range $port, $_ := $ports }}
{{- $name := printf "%s_address" $port }}
{{- if and (has $component $components) (hasKey $section $name) }}
{{- fail (printf "settings.%s.%s is set, but this release installs that service and sets its address: remove the setting" $component $name) }}
{{- end }}
{{- end }}
{{- end }}
{{- if hasKey $settings "redis" }}
{{- if hasKey $settings.redis "url" }}
{{- fail "settings.redis.url is set, but it may contain a password: set redis.enabled=false, redis.external.url and redis.external.existingSecret instead" }}
{{- end }}
{{- end }}
{{- if hasKey (default dict $settings.rollout) "auth_token_file" }}
{{- fail "settings.rollout.auth_token_file is set, but the chart mounts this file: set rollout.auth.existingSecret instead" }}
{{- end }}
{{- range $name := list "signing_key_file" "verify_key_file" "require_signed" }}
{{- if hasKey (default dict $settings.security) $name }}
{{- fail (printf "settings.security.%s is set, but the chart mounts these keys: set signing.existingSecret instead" $name) }}
{{- end }}
{{- end }}
{{- if hasKey (default dict $settings.console) "auth_token_file" }}
{{- fail "settings.console.auth_token_file is set, but the chart mounts this file: set console.auth.existingSecret instead" }}
{{- end }}
{{- range $component := list "retriever" "reward" }}
{{- if hasKey (default dict (index $settings $component)) "auth_token_file" }}
{{- fail (printf "settings.%s.auth_token_file is set, but the chart mounts this file: set %s.auth.existingSecret instead" $component $component) }}
{{- end }}
{{- end }}
{{- if hasKey $settings "tls" }}
{{- fail "settings.tls is set, but the chart mounts these files: set tls.enabled and tls.certManager or tls.existingSecret instead" }}
{{- end }}
{{- with $values.tls }}
{{- if and .enabled (not .certManager.enabled) (not .existingSecret) }}
{{- fail "tls.enabled is true and nothing gives certificates: set tls.certManager.enabled, or tls.existingSecret to a Secret with tls.crt, tls.key and ca.crt" }}
{{- end }}
{{- if and .certManager.enabled .existingSecret }}
{{- fail "tls.certManager.enabled is true and tls.existingSecret is set: choose one of them" }}
{{- end }}
{{- if and .certManager.enabled (not .certManager.issuerRef.name) }}
{{- fail "tls.certManager.enabled is true and tls.certManager.issuerRef.name is empty: name the Issuer or ClusterIssuer that signs" }}
{{- end }}
{{- if and (not .enabled) (or .requireClientCert .certManager.enabled .existingSecret) }}
{{- fail "tls.enabled is false and other values of tls are set: set tls.enabled too" }}
{{- end }}
{{- end }}
{{- with $values.console.ingress }}
{{- if and .enabled (not $values.console.enabled) }}
{{- fail "console.ingress.enabled is true and console.enabled is false: enable the console too" }}
{{- end }}
{{- if and .enabled (not .host) }}
{{- fail "console.ingress.enabled is true and console.ingress.host is empty: set it to the name that browsers use" }}
{{- end }}
{{- if and .enabled $values.networkPolicy.enabled (not (index $values.networkPolicy.clients "console")) }}
{{- fail "console.ingress.enabled is true, but the network policy lets no ingress controller in: set networkPolicy.clients.console to the controller's pods" }}
{{- end }}
{{- end }}
{{- range $name := list "ray_address" "use_existing_app" }}
{{- if hasKey (default dict $settings.rollout) $name }}
{{- fail (printf "settings.rollout.%s is set, but the chart starts Ray itself: set rollout.mode to deployment or rayservice instead" $name) }}
{{- end }}
{{- end }}

{{- range $name := list "nnodes" "n_gpus_per_node" "ray" }}
{{- if hasKey (default dict $settings.trainer) $name }}
{{- fail (printf "settings.trainer.%s is set, but the chart derives it: set trainer.mode, trainer.nodes and trainer.gpu.count instead" $name) }}
{{- end }}
{{- end }}

{{- if eq "colocated" (dig "trainer" "placement" "separate" $settings) }}
{{- fail "settings.trainer.placement is colocated, but Kubernetes gives a GPU to one pod: leave it separate, and give GPUs to rollout and trainer" }}
{{- end }}

{{- range $values.fetch }}
{{- if contains "CHANGE-ME" .url }}
{{- fail (printf "fetch has %s: write the address of your own copy in place of CHANGE-ME" .url) }}
{{- end }}
{{- end }}

{{- if and $values.redis.enabled (or $values.redis.external.url $values.redis.external.existingSecret) }}
{{- fail "redis.enabled is true and redis.external is set: set redis.enabled=false to use the external Redis" }}
{{- end }}
{{- $streams := or (ne $values.rollout.mode "none") (ne $values.trainer.mode "none") }}
{{- if and $streams (not (or $values.redis.enabled $values.redis.external.url)) }}
{{- fail "redis.enabled is false and no external Redis is set: set redis.external.url, and redis.external.existingSecret for its users" }}
{{- end }}
{{- if regexMatch "//[^/@]*:[^/@]*@" $values.redis.external.url }}
{{- fail "redis.external.url contains a password, which would be stored in a ConfigMap: put the passwords of forage redis acl into a Secret, a key for each user, and name it in redis.external.existingSecret" }}
{{- end }}

{{- if ne $values.rollout.mode "none" }}
{{- if and (not $values.retriever.enabled) (not (dig "retriever" "http_address" "" $settings)) }}
{{- fail "retriever.enabled is false but the rollout needs a retriever: set settings.retriever.http_address to the host:port of another one" }}
{{- end }}
{{- if and (not $values.reward.enabled) (not (dig "reward" "grpc_address" "" $settings)) }}
{{- fail "reward.enabled is false but the rollout needs a reward service: set settings.reward.grpc_address to the host:port of another one" }}
{{- end }}
{{- $tensorParallel := dig "rollout" "engine" "tensor_parallel_size" 1 $settings | int }}
{{- $gpus := int $values.rollout.gpu.count }}
{{- if and $gpus (gt $tensorParallel $gpus) }}
{{- fail (printf "settings.rollout.engine.tensor_parallel_size is %d but a rollout pod has %d GPUs: set rollout.gpu.count to at least %d" $tensorParallel $gpus $tensorParallel) }}
{{- end }}
{{- $engines := dig "rollout" "engine_replicas" "max" (dig "rollout" "engine_replicas" "min" 1 $settings) $settings | int }}
{{- $needed := mul $engines $tensorParallel | int }}
{{- if and (eq $values.rollout.mode "deployment") $gpus (gt $needed $gpus) }}
{{- fail (printf "settings.rollout.engine_replicas.max needs %d GPUs but a rollout pod has %d: raise rollout.gpu.count, raise rollout.replicas instead of engine_replicas, or set rollout.mode=rayservice" $needed $gpus) }}
{{- end }}
{{- $available := mul $values.rollout.rayservice.workers.maxReplicas (max 1 $gpus) | int }}
{{- if and (eq $values.rollout.mode "rayservice") $gpus (gt $needed $available) }}
{{- fail (printf "settings.rollout.engine_replicas.max needs %d GPUs but rollout.rayservice.workers.maxReplicas nodes have %d: raise rollout.rayservice.workers.maxReplicas or lower settings.rollout.engine_replicas.max" $needed $available) }}
{{- end }}
{{- end }}
{{- with $values.rollout.rayservice.workers }}
{{- if or (lt (int .replicas) (int .minReplicas)) (gt (int .replicas) (int .maxReplicas)) }}
{{- fail (printf "rollout.rayservice.workers.replicas is %d, expected a number from minReplicas (%d) to maxReplicas (%d)" (int .replicas) (int .minReplicas) (int .maxReplicas)) }}
{{- end }}
{{- end }}
{{- if $values.rollout.keda.enabled }}
{{- if ne $values.rollout.mode "deployment" }}
{{- fail (printf "rollout.keda.enabled is true but rollout.mode is %s: KEDA scales only a Deployment; to scale a RayService, set settings.rollout.engine_replicas and rollout.rayservice.workers" $values.rollout.mode) }}
{{- end }}
{{- if not (or $values.redis.enabled $values.rollout.keda.prometheusAddress) }}
{{- fail "rollout.keda.enabled is true but there is no metric to scale by, because Redis is external and no Prometheus is set: set rollout.keda.prometheusAddress" }}
{{- end }}
{{- end }}

{{- if and (eq $values.trainer.mode "job") (gt (int $values.trainer.nodes) 1) }}
{{- fail (printf "trainer.nodes is %d but a Job runs on one node: set trainer.mode=rayjob" (int $values.trainer.nodes)) }}
{{- end }}
{{- $shared := has "ReadWriteMany" $values.storage.shared.accessModes }}
{{- if and (not $shared) (not $values.storage.shared.existingClaim) }}
{{- if eq $values.trainer.mode "rayjob" }}
{{- fail "trainer.mode is rayjob but its nodes share no volume: add ReadWriteMany to storage.shared.accessModes, or name a ReadWriteMany claim in storage.shared.existingClaim" }}
{{- end }}
{{- if eq $values.rollout.mode "rayservice" }}
{{- fail "rollout.mode is rayservice but its nodes cannot read the trainer's policies: add ReadWriteMany to storage.shared.accessModes, or name a ReadWriteMany claim in storage.shared.existingClaim" }}
{{- end }}
{{- end }}
{{- if not (hasPrefix "/data/" (dig "run" "dir" "/data/runs" $settings)) }}
{{- fail (printf "settings.run.dir is %s, which is lost when the pod restarts: set a folder below /data/" $settings.run.dir) }}
{{- end }}
{{- if and (eq $values.retriever.data.kind "claim") (not $values.retriever.data.existingClaim) }}
{{- fail "retriever.data.kind is claim but no claim is named: set retriever.data.existingClaim" }}
{{- end }}
{{- if and (eq $values.trainer.mode "none") (eq $values.rollout.mode "none") (eq $values.retriever.data.kind "shared") (not $values.storage.shared.existingClaim) }}
{{- fail "retriever.data.kind is shared but a release without trainer and rollout creates no shared volume: set storage.shared.existingClaim, or another retriever.data.kind" }}
{{- end }}
{{- include "forage.validate.upgrade" . }}
{{- end }}
