{{/* The name of the trainer's Job, with a digest of its specification: a Job is immutable and must be replaced. */}}
{{- define "forage.trainer.name" -}}
{{- printf "%s-%s" (include "forage.part" .part) (.spec | sha256sum | trunc 8) -}}
{{- end }}
