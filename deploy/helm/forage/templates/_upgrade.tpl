{{/*
Changes that Kubernetes refuses in the middle of an upgrade, and what a failed upgrade left: refused here, before anything
is applied. Where no cluster is asked (helm template, Argo CD), `lookup` finds nothing, and nothing is refused.
*/}}
{{- define "forage.validate.upgrade" -}}
{{- $space := .Release.Namespace -}}
{{- $own := include "forage.part" (dict "root" . "component" "settings") -}}
{{- range (lookup "v1" "ConfigMap" $space "").items }}
{{- if and (include "forage.isOurs" (dict "root" $ "component" "settings" "item" .)) (not (hasPrefix $own .metadata.name)) }}
{{- fail (printf "the release %s has objects named %s…, and these values name them %s…: names of an installed release cannot change, because its volumes keep them. Restore fullnameOverride and nameOverride, or uninstall first" $.Release.Name (trimSuffix "settings" .metadata.name) (trimSuffix "settings" $own)) }}
{{- end }}
{{- end }}

{{- with .Values.redis }}
{{- $name := include "forage.part" (dict "root" $ "component" "redis") }}
{{- $server := lookup "apps/v1" "StatefulSet" $space $name }}
{{- if and .enabled $server }}
{{- $spec := (index $server.spec.volumeClaimTemplates 0).spec }}
{{- $remedy := printf "keep the old value and change the claim data-%s-0 itself, or first run: kubectl -n %s delete statefulset %s --cascade=orphan" $name $space $name }}
{{- if ne (include "forage.bytes" .storage.size) (include "forage.bytes" $spec.resources.requests.storage) }}
{{- fail (printf "redis.storage.size is %v, but the StatefulSet %s was made with %v, which cannot be changed: %s" .storage.size $name $spec.resources.requests.storage $remedy) }}
{{- end }}
{{- if and .storage.storageClassName (ne .storage.storageClassName (default "" $spec.storageClassName)) }}
{{- fail (printf "redis.storage.storageClassName is %s, but the StatefulSet %s was made with '%s', which cannot be changed: %s" .storage.storageClassName $name (default "" $spec.storageClassName) $remedy) }}
{{- end }}
{{- end }}
{{- end }}

{{- with .Values.storage.shared }}
{{- $name := include "forage.shared.claim" $ }}
{{- $claim := lookup "v1" "PersistentVolumeClaim" $space $name }}
{{- if and (not .existingClaim) $claim }}
{{- $remedy := printf "restore the value, or name a new claim with a copy of the files in storage.shared.existingClaim" }}
{{- if ne (sortAlpha .accessModes | join " ") (sortAlpha $claim.spec.accessModes | join " ") }}
{{- fail (printf "storage.shared.accessModes is %v, but the claim %s has %v, which cannot be changed: %s" .accessModes $name $claim.spec.accessModes $remedy) }}
{{- end }}
{{- if and .storageClassName (ne .storageClassName (default "" $claim.spec.storageClassName)) }}
{{- fail (printf "storage.shared.storageClassName is %s, but the claim %s has '%s', which cannot be changed: %s" .storageClassName $name (default "" $claim.spec.storageClassName) $remedy) }}
{{- end }}
{{- if lt (include "forage.bytes" .size | int64) (include "forage.bytes" $claim.spec.resources.requests.storage | int64) }}
{{- fail (printf "storage.shared.size is %v, but the claim %s has %v, and no claim can shrink: %s" .size $name $claim.spec.resources.requests.storage $remedy) }}
{{- end }}
{{- end }}
{{- end }}

{{- $left := include "forage.trainer.left" . }}
{{- if $left }}
{{- fail (printf "an upgrade that failed left%s beside the installed trainer: run helm -n %s rollback %s, or kubectl -n %s delete%s, and upgrade again" $left $space .Release.Name $space $left) }}
{{- end }}
{{- end }}

{{/* Every object calls this first: values of an older chart would end in an error of a template. */}}
{{- define "forage.validate.age" -}}
{{- if not .Values.networkPolicy.dns }}
{{- fail "networkPolicy.dns is missing: helm upgrade --reuse-values keeps the values of an older chart, without what this one has added: use --reset-then-reuse-values instead" }}
{{- end }}
{{- end }}

{{/* "true" if an object of the cluster belongs to a component of this release: (dict "root" $ "component" … "item" …) */}}
{{- define "forage.isOurs" -}}
{{- $labels := default dict .item.metadata.labels -}}
{{- $wanted := include "forage.selector" . | fromYaml -}}
{{- if and (eq (pick $labels "app.kubernetes.io/instance" "app.kubernetes.io/component" | toJson) (toJson $wanted)) (not .item.metadata.ownerReferences) }}true{{ end }}
{{- end }}

{{/* A class that is set, else that of the existing object: an upgrade without the value must not take it away. */}}
{{- define "forage.storageClass" -}}
{{- with default (dig "storageClassName" "" (default dict .existing)) .set -}}
storageClassName: {{ . }}
{{- end }}
{{- end }}

{{/* Jobs and RayJobs of the trainer besides the oldest, which is the installed one, besides the one of these values, and
     besides those that Helm has deleted, which KubeRay keeps until their cluster has ended: " job/forage-trainer-1234abcd …" */}}
{{- define "forage.trainer.left" -}}
{{- $found := list -}}
{{- $kinds := dict "Job" "batch/v1" -}}
{{- /* Who installs a Job may lack the right to list RayJobs, and then the lookup would fail. */}}
{{- if and (eq .Values.trainer.mode "rayjob") (.Capabilities.APIVersions.Has "ray.io/v1/RayJob") }}{{ $_ := set $kinds "RayJob" "ray.io/v1" }}{{ end -}}
{{- range $kind, $version := $kinds }}
{{- range (lookup $version $kind $.Release.Namespace "").items }}
{{- if and (include "forage.isOurs" (dict "root" $ "component" "trainer" "item" .)) (not .metadata.deletionTimestamp) }}
{{- $found = append $found (printf "%s %s/%s" .metadata.creationTimestamp (lower $kind) .metadata.name) }}
{{- end }}
{{- end }}
{{- end }}
{{- range rest (sortAlpha $found) }}
{{- $name := splitList " " . | last }}
{{- if ne (base $name) (include "forage.trainer.name" $) }} {{ $name }}{{ end }}
{{- end }}
{{- end }}
