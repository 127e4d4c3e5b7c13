{{/* The settings: the user's, default paths of this chart, and the chart's addresses. */}}

{{- define "forage.settings.defaults" -}}
run: {dir: /data/runs}
retriever: {cache_dir: /cache/retriever}
rollout: {weights: {cache_dir: /cache/policies}}
console: {cache_dir: /cache/console}
{{- if .Values.world.enabled }}
data: {train_files: [/data/world/train.parquet], val_files: [/data/world/test.parquet], corpus: /data/world/corpus.jsonl}
{{- end }}
{{- end }}

{{- define "forage.settings.own" -}}
{{- $components := include "forage.components" . | fromYamlArray -}}
{{- $own := dict -}}
{{- range $component, $ports := omit (include "forage.ports" . | fromYaml) "redis" }}
{{- if has $component $components }}
{{- $addresses := dict -}}
{{- range $port, $number := $ports }}
{{- $_ := set $addresses (printf "%s_address" $port) (printf "%s:%v" (include "forage.part" (dict "root" $ "component" $component)) $number) }}
{{- end }}
{{- $_ := set $own $component $addresses }}
{{- end }}
{{- end }}
{{- range $component := list "retriever" "reward" "rollout" }}
{{- if include "forage.auth.used" (dict "root" $ "component" $component) }}
{{- $_ := set $own $component (merge (dict "auth_token_file" (printf "/etc/forage/%s-token/token" $component)) (default dict (get $own $component))) }}
{{- end }}
{{- end }}
{{- if .Values.tls.enabled }}
{{- $_ := set $own "tls" (dict "cert" "/etc/forage/tls/tls.crt" "key" "/etc/forage/tls/tls.key" "ca" "/etc/forage/tls/ca.crt" "require_client_cert" .Values.tls.requireClientCert) }}
{{- end }}
{{- if .Values.console.enabled }}
{{- $_ := set $own.console "auth_token_file" "/etc/forage/console-token/token" }}
{{- end }}
{{- if .Values.signing.existingSecret }}
{{- $folder := "/etc/forage/signing" }}
{{- $keys := dict "signing_key_file" (printf "%s/signing-key.pem" $folder) "verify_key_file" (printf "%s/verify-key.pem" $folder) }}
{{- $_ := set $own "security" (merge (dict "require_signed" true) $keys) }}
{{- end }}
{{- if eq .Values.trainer.mode "rayjob" }}
{{- $_ := set $own.trainer "nnodes" .Values.trainer.nodes }}
{{- $_ := set $own.trainer "n_gpus_per_node" (max 1 .Values.trainer.gpu.count) }}
{{- $_ := set $own.trainer "ray" (dict "address" "auto") }}
{{- end }}
{{- if and (include "forage.direct" .) (hasKey $own "trainer") }}
{{- $_ := set $own.trainer "publish" (dict "direct_address" (printf ":%s" (include "forage.direct.port" .))) }}
{{- end }}
{{- $_ := set $own "redis" (dict "url" (include "forage.redis.url" .)) }}
{{- toYaml $own }}
{{- end }}

{{/* What `forage plan` has to know besides the settings: processes that torchrun starts, and engines of all pods. */}}
{{- define "forage.plan" -}}
{{- if and (eq .Values.trainer.mode "job") (int .Values.trainer.gpu.count) }} trainer.n_gpus_per_node={{ .Values.trainer.gpu.count }}{{ end }}
{{- if and (eq .Values.rollout.mode "deployment") (gt (int .Values.rollout.replicas) 1) }}
{{- $engines := mul .Values.rollout.replicas (dig "rollout" "engine_replicas" "min" 1 (include "forage.settings" . | fromYaml)) }} 'rollout.engine_replicas={min: {{ $engines }}, max: {{ $engines }}}'
{{- end }}
{{- end }}

{{/* Without a password: each part has a user of its own, whose password is in a file. */}}
{{- define "forage.redis.url" -}}
{{- if .Values.redis.enabled -}}
{{ ternary "rediss" "redis" .Values.tls.enabled }}://{{ include "forage.part" (dict "root" . "component" "redis") }}:6379/0
{{- else -}}
{{ default "redis://none:6379/0" .Values.redis.external.url }}
{{- end }}
{{- end }}

{{/*
`merge` keeps existing values, including false and 0; its last argument only fills gaps. Helm reads YAML 1.1, in which the
key `n` of `rollout.n` means false: this restores the name. The tiny models are in the images; other relative paths begin at
the volume.
*/}}
{{- define "forage.settings" -}}
{{- $settings := merge (deepCopy .Values.settings) (include "forage.settings.defaults" . | fromYaml) -}}
{{- $model := dig "model" "path" "models/tiny-policy" $settings }}
{{- if hasPrefix "models/tiny-" $model }}
{{- $_ := set $settings "model" (merge (dict "path" (printf "/app/%s" $model)) (default dict $settings.model)) }}
{{- end }}
{{- if hasKey (default dict $settings.rollout) "false" }}
{{- $_ := set $settings.rollout "n" (get $settings.rollout "false") }}
{{- $_ := unset $settings.rollout "false" }}
{{- end }}
{{- mergeOverwrite $settings (include "forage.settings.own" . | fromYaml) | toYaml -}}
{{- end }}

{{/* A part restarts only when the settings that it reads have changed. Of retriever and reward, callers read these. */}}
{{- define "forage.settings.checksum" -}}
{{- $settings := include "forage.settings" .root | fromYaml -}}
{{- if ne .component "console" }}
{{- $settings = omit $settings "console" }}
{{- end }}
{{- if eq .component "retriever" }}
{{- $settings = pick $settings "retriever" "data" "tracing" "tls" "security" }}
{{- else if eq .component "reward" }}
{{- $settings = pick $settings "reward" "tracing" "tls" "security" }}
{{- else if ne .component "console" }}
{{- $_ := set $settings "retriever" (pick (default dict $settings.retriever) "http_address" "grpc_address" "auth_token_file") }}
{{- $_ := set $settings "reward" (pick (default dict $settings.reward) "grpc_address" "health_address" "auth_token_file" "routes") }}
{{- end }}
{{- if eq .component "rollout" }}
{{- $_ := set $settings "trainer" (pick (default dict $settings.trainer) "save_freq" "max_staleness" "publish") }}
{{- end -}}
{{- toJson $settings | sha256sum -}}
{{- end }}
