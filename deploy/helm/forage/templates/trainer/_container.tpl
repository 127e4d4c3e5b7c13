{{/* Settings of the trainer by which its Job's name is told apart: a Job cannot be changed, only replaced. */}}
{{- define "forage.trainer.name" -}}
{{- printf "%s-%s" (include "forage.part" .part) (.spec | sha256sum | trunc 8) -}}
{{- end }}
