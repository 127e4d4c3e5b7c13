{{/* Metadata with the labels that a Prometheus operator or Grafana selects. */}}
{{- define "forage.monitoring.metadata" -}}
{{- $metadata := include "forage.metadata" . | fromYaml -}}
{{- $_ := set $metadata "labels" (merge (deepCopy .root.Values.monitoring.labels) (default dict .labels) $metadata.labels) -}}
{{- toYaml $metadata -}}
{{- end }}
