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
{{- fail (printf "settings.%s.%s is set, and this release installs that service, whose Service it is: leave the setting out" $component $name) }}
{{- end }}
{{- end }}
{{- end }}
{{- if hasKey $settings "redis" }}
{{- if hasKey $settings.redis "url" }}
{{- fail "settings.redis.url is set, and may hold a password: set redis.external.url, or redis.external.existingSecret, and redis.enabled=false" }}
{{- end }}
{{- end }}
{{- if hasKey (default dict $settings.rollout) "auth_token_file" }}
{{- fail "settings.rollout.auth_token_file is set, which is a file of the chart's: set rollout.auth.existingSecret" }}
{{- end }}
{{- range $name := list "ray_address" "use_existing_app" }}
{{- if hasKey (default dict $settings.rollout) $name }}
{{- fail (printf "settings.rollout.%s is set, and the chart starts the Ray that it needs: set rollout.mode to deployment or rayservice" $name) }}
{{- end }}
{{- end }}

{{- range $name := list "launcher" "nnodes" "n_gpus_per_node" "ray" }}
{{- if hasKey (default dict $settings.trainer) $name }}
{{- fail (printf "settings.trainer.%s is set, which follows from where the chart puts the trainer: set trainer.mode, trainer.nodes and trainer.gpu.count" $name) }}
{{- end }}
{{- end }}

{{- if and $values.redis.enabled (or $values.redis.external.url $values.redis.external.existingSecret) }}
{{- fail "redis.enabled is true and redis.external names another: set redis.enabled=false to use that one" }}
{{- end }}
{{- $streams := or (ne $values.rollout.mode "none") (ne $values.trainer.mode "none") }}
{{- if and $streams (not (or $values.redis.enabled $values.redis.external.url $values.redis.external.existingSecret)) }}
{{- fail "redis.enabled is false and there is no other: set redis.external.url or redis.external.existingSecret" }}
{{- end }}
{{- if regexMatch "//[^/]*@" $values.redis.external.url }}
{{- fail "redis.external.url has a password in it, which would be in a ConfigMap: put the whole URL into a Secret and name it in redis.external.existingSecret" }}
{{- end }}

{{- if ne $values.rollout.mode "none" }}
{{- if and (not $values.retriever.enabled) (not (dig "retriever" "http_address" "" $settings)) }}
{{- fail "retriever.enabled is false and the rollout needs one: set settings.retriever.http_address to host:port of another" }}
{{- end }}
{{- if and (not $values.reward.enabled) (not (dig "reward" "grpc_address" "" $settings)) }}
{{- fail "reward.enabled is false and the rollout needs one: set settings.reward.grpc_address to host:port of another" }}
{{- end }}
{{- $tensorParallel := dig "rollout" "engine" "tensor_parallel_size" 1 $settings | int }}
{{- $gpus := int $values.rollout.gpu.count }}
{{- if and $gpus (gt $tensorParallel $gpus) }}
{{- fail (printf "settings.rollout.engine.tensor_parallel_size is %d and a pod of the rollout has %d GPUs: set rollout.gpu.count to at least %d" $tensorParallel $gpus $tensorParallel) }}
{{- end }}
{{- $engines := dig "rollout" "engine_replicas" "max" (dig "rollout" "engine_replicas" "min" 1 $settings) $settings | int }}
{{- $needed := mul $engines $tensorParallel | int }}
{{- if and (eq $values.rollout.mode "deployment") $gpus (gt $needed $gpus) }}
{{- fail (printf "settings.rollout.engine_replicas.max asks for %d GPUs in a pod that has %d: raise rollout.gpu.count, or rollout.replicas instead of engine_replicas, or set rollout.mode=rayservice" $needed $gpus) }}
{{- end }}
{{- $most := mul $values.rollout.rayservice.workers.maxReplicas (max 1 $gpus) | int }}
{{- if and (eq $values.rollout.mode "rayservice") $gpus (gt $needed $most) }}
{{- fail (printf "settings.rollout.engine_replicas.max asks for %d GPUs and rollout.rayservice.workers.maxReplicas nodes have %d: raise one or lower the other" $needed $most) }}
{{- end }}
{{- end }}
{{- with $values.rollout.rayservice.workers }}
{{- if or (lt (int .replicas) (int .minReplicas)) (gt (int .replicas) (int .maxReplicas)) }}
{{- fail (printf "rollout.rayservice.workers.replicas is %d, outside minReplicas %d to maxReplicas %d" (int .replicas) (int .minReplicas) (int .maxReplicas)) }}
{{- end }}
{{- end }}
{{- if $values.rollout.keda.enabled }}
{{- if ne $values.rollout.mode "deployment" }}
{{- fail (printf "rollout.keda.enabled is true and rollout.mode is %s: KEDA scales a Deployment; a RayService scales by settings.rollout.engine_replicas and rollout.rayservice.workers" $values.rollout.mode) }}
{{- end }}
{{- if not (or $values.redis.enabled $values.rollout.keda.prometheusAddress) }}
{{- fail "rollout.keda.enabled is true, Redis is external and there is no Prometheus, so there is nothing to scale by: set rollout.keda.prometheusAddress" }}
{{- end }}
{{- end }}

{{- if and (eq $values.trainer.mode "job") (gt (int $values.trainer.nodes) 1) }}
{{- fail (printf "trainer.nodes is %d and a Job runs on one: set trainer.mode=rayjob" (int $values.trainer.nodes)) }}
{{- end }}
{{- $shared := has "ReadWriteMany" $values.storage.shared.accessModes }}
{{- if and (not $shared) (not $values.storage.shared.existingClaim) }}
{{- if eq $values.trainer.mode "rayjob" }}
{{- fail "trainer.mode is rayjob and the nodes have no volume in common: add ReadWriteMany to storage.shared.accessModes, or name a claim that has it in storage.shared.existingClaim" }}
{{- end }}
{{- if eq $values.rollout.mode "rayservice" }}
{{- fail "rollout.mode is rayservice and its nodes cannot read the trainer's policies: add ReadWriteMany to storage.shared.accessModes, or name a claim that has it in storage.shared.existingClaim" }}
{{- end }}
{{- end }}
{{- if not (hasPrefix "/data/" (dig "run" "dir" "/data/runs" $settings)) }}
{{- fail (printf "settings.run.dir is %s, which a restart would lose: choose a folder below /data/" $settings.run.dir) }}
{{- end }}
{{- if and (eq $values.retriever.data.kind "claim") (not $values.retriever.data.existingClaim) }}
{{- fail "retriever.data.kind is claim: name it in retriever.data.existingClaim" }}
{{- end }}
{{- if and (eq $values.trainer.mode "none") (eq $values.rollout.mode "none") (eq $values.retriever.data.kind "shared") (not $values.storage.shared.existingClaim) }}
{{- fail "retriever.data.kind is shared, and without trainer and rollout there is no such volume: set storage.shared.existingClaim, or another kind" }}
{{- end }}
{{- end }}
