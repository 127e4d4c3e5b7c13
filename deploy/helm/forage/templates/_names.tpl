{{/* Names, labels, images, ports. A `part` is (dict "root" $ "component" "retriever"). */}}

{{/* Short: KubeRay takes no RayJob with a name of more than 47 characters, and <fullname>-trainer-<digest> adds 17. */}}
{{- define "forage.fullname" -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- $full := ternary .Release.Name (printf "%s-%s" .Release.Name $name) (contains $name .Release.Name) -}}
{{- default $full .Values.fullnameOverride | trunc 30 | trimSuffix "-" -}}
{{- end }}

{{- define "forage.part" -}}
{{- printf "%s-%s" (include "forage.fullname" .root) .component -}}
{{- end }}

{{/* Labels for selectors. Not app.kubernetes.io/name, which KubeRay sets on its pods. */}}
{{- define "forage.selector" -}}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end }}

{{- define "forage.labels" -}}
{{ include "forage.selector" . }}
app.kubernetes.io/name: {{ .root.Chart.Name }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version }}
{{- end }}

{{/* name, namespace and labels of an object: (dict "root" $ "component" "redis" "suffix" "auth"); with … "workload" true
     the labels of the values, too */}}
{{- define "forage.metadata" -}}
{{- include "forage.validate.age" .root -}}
name: {{ include "forage.part" . }}{{ with .suffix }}-{{ . }}{{ end }}
namespace: {{ .root.Release.Namespace }}
labels:
  {{- include "forage.labels" . | nindent 2 }}
  {{- if .workload }}
  {{- with (index .root.Values .component).labels }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
  {{- end }}
{{- end }}

{{/* The image of a part, with a tag of its own where the part has GPUs, or (dict "root" $ "image" .Values.cli.image). */}}
{{- define "forage.image" -}}
{{- $values := ternary (index .root.Values (default "" .component)) dict (empty .image) -}}
{{- $image := default $values.image .image -}}
{{- $registry := default .root.Values.image.registry $image.registry -}}
{{- $tag := printf "%s%s" (default .root.Chart.AppVersion .root.Values.image.tag) (ternary "-gpu" "" (gt (dig "gpu" "count" 0 $values | int) 0)) -}}
{{- with $registry }}{{ . }}/{{ end }}{{ $image.repository }}
{{- if $image.digest }}@{{ $image.digest }}{{ else }}:{{ default $tag $image.tag }}{{ end -}}
{{- end }}

{{/* Ports of each component; "<name>_address" is the corresponding setting. */}}
{{- define "forage.ports" -}}
retriever: {http: 18610, grpc: 18611}
reward: {grpc: 18620, health: 18621}
rollout: {grpc: 18630, health: 18631, http: 18632}
trainer: {health: 18641}
console: {http: 18650}
redis: {redis: 6379}
{{- end }}

{{/* "true" if the trainer sends policies to the engines itself, from this port. */}}
{{- define "forage.direct" -}}
{{- if eq "direct" (dig "rollout" "weights" "transport" "filesystem" .Values.settings) }}true{{ end }}
{{- end }}
{{- define "forage.direct.port" -}}18642{{- end }}

{{/*
Who calls whom, on which ports: docs/start/architecture.md. The network policies derive from this. `range`: the
ports from which Linux takes any free one; transfers of policies use such, and either end may connect to the other.
*/}}
{{- define "forage.arrows" -}}
- {from: rollout, to: retriever, ports: [http, grpc]}
- {from: rollout, to: reward, ports: [grpc]}
- {from: rollout, to: redis, ports: [redis]}
- {from: trainer, to: redis, ports: [redis]}
- {from: trainer, to: reward, ports: [grpc]}
{{- $trainer := dig "trainer" dict .Values.settings }}
{{- if or (dig "probe" "freq" 0 $trainer) (dig "algorithm" "probe_penalty" "coef" 0.0 $trainer) }}
- {from: trainer, to: rollout, ports: [grpc, http]}
{{- end }}
{{- if include "forage.direct" . }}
- {from: rollout, to: trainer, number: {{ include "forage.direct.port" . }}, range: true}
- {from: trainer, to: rollout, range: true}
- {from: rollout, to: rollout, range: true}
{{- end }}
- {from: console, to: retriever, ports: [http]}
- {from: console, to: reward, ports: [grpc, health]}
- {from: console, to: rollout, ports: [grpc, health]}
- {from: console, to: trainer, ports: [health]}
- {from: console, to: redis, ports: [redis]}
- {from: test, to: rollout, ports: [grpc, http, health]}
{{- end }}

{{/* Components that this release installs, as a list. */}}
{{- define "forage.components" -}}
{{- range $component := list "retriever" "reward" "redis" "console" }}
{{- if (index $.Values $component).enabled }}
- {{ $component }}
{{- end }}
{{- end }}
{{- if ne .Values.rollout.mode "none" }}
- rollout
{{- end }}
{{- if ne .Values.trainer.mode "none" }}
- trainer
{{- end }}
{{- end }}

{{/* "true" if the cluster has the Prometheus operator. */}}
{{- define "forage.monitored" -}}
{{- if .Capabilities.APIVersions.Has "monitoring.coreos.com/v1" }}true{{ end }}
{{- end }}

{{/* "true" if the release has a Ray cluster of KubeRay. */}}
{{- define "forage.usesRay" -}}
{{- if or (eq .Values.rollout.mode "rayservice") (eq .Values.trainer.mode "rayjob") }}true{{ end }}
{{- end }}

{{/* "true" if the rollout serves gRPC and HTTP. */}}
{{- define "forage.answers" -}}
{{- if or (eq .Values.rollout.mode "deployment") (and (eq .Values.rollout.mode "rayservice") .Values.rollout.rayservice.front.enabled) }}true{{ end }}
{{- end }}
