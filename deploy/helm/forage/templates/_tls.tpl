{{/* Certificates and tokens of the wires. A `part` is (dict "root" $ "component" "retriever"). */}}

{{/* The Secret of a part's certificate, with the keys that cert-manager writes: tls.crt, tls.key, ca.crt. */}}
{{- define "forage.tls.secret" -}}
{{- default (printf "%s-tls" (include "forage.part" .)) .root.Values.tls.existingSecret -}}
{{- end }}

{{- define "forage.tls.scheme" -}}{{ ternary "HTTPS" "HTTP" .Values.tls.enabled }}{{- end }}

{{/* Names under which callers reach a part; those in its own pod use localhost. */}}
{{- define "forage.tls.names" -}}
{{- $name := include "forage.part" . -}}
{{- $space := .root.Release.Namespace -}}
- {{ $name }}
- {{ $name }}.{{ $space }}
- {{ $name }}.{{ $space }}.svc
- {{ $name }}.{{ $space }}.svc.cluster.local
- localhost
{{- end }}

{{/* tlsConfig of a scrape of a part: its authority, its name, and a certificate where callers need one. */}}
{{- define "forage.tls.scrape" -}}
{{- $secret := include "forage.tls.secret" . -}}
serverName: {{ include "forage.part" . }}
ca: {secret: {name: {{ $secret }}, key: ca.crt}}
{{- if .root.Values.tls.requireClientCert }}
cert: {secret: {name: {{ $secret }}, key: tls.crt}}
keySecret: {name: {{ $secret }}, key: tls.key}
{{- end }}
{{- end }}

{{/* The Secret of a part's token, and "true" if it has one. That of a part elsewhere is yours. */}}
{{- define "forage.auth.secret" -}}
{{- default (printf "%s-token" (include "forage.part" .)) (index .root.Values .component).auth.existingSecret -}}
{{- end }}
{{- define "forage.auth.generated" -}}
{{- $values := index .root.Values .component -}}
{{- $installed := ternary (include "forage.answers" .root) (ternary "true" "" (default false $values.enabled)) (eq .component "rollout") -}}
{{- if and $values.auth.enabled $installed (not $values.auth.existingSecret) }}true{{ end }}
{{- end }}
{{- define "forage.auth.used" -}}
{{- $auth := (index .root.Values .component).auth -}}
{{- if eq .component "rollout" }}{{ if and $auth.enabled (include "forage.answers" .root) }}true{{ end }}
{{- else if and $auth.enabled (or $auth.existingSecret (index .root.Values .component).enabled) }}true{{ end }}
{{- end }}

{{/* Tokens that a part's containers read, as names of components: its own, and those of services that it calls. */}}
{{- define "forage.auth.tokens" -}}
{{- $readers := dict "retriever" (list "retriever" "rollout" "console") "reward" (list "reward" "rollout" "trainer" "console") "rollout" (list "rollout" "console" "test") -}}
{{- $trainer := dig "trainer" dict .root.Values.settings -}}
{{- if or (dig "probe" "freq" 0 $trainer) (dig "algorithm" "probe_penalty" "coef" 0.0 $trainer) }}
{{- $_ := set $readers "rollout" (append $readers.rollout "trainer") }}
{{- end }}
{{- range $service, $components := $readers }}
{{- if and (has $.component $components) (include "forage.auth.used" (dict "root" $.root "component" $service)) }}
- {{ $service }}
{{- end }}
{{- end }}
{{- end }}

{{/* Mounts and volumes of tokens and certificate. */}}
{{- define "forage.auth.mounts" -}}
{{- range include "forage.auth.tokens" . | fromYamlArray }}
- {name: {{ . }}-token, mountPath: /etc/forage/{{ . }}-token, readOnly: true}
{{- end }}
{{- if .root.Values.tls.enabled }}
- {name: tls, mountPath: /etc/forage/tls, readOnly: true}
{{- end }}
{{- end }}

{{- define "forage.auth.volumes" -}}
{{- range include "forage.auth.tokens" . | fromYamlArray }}
- name: {{ . }}-token
  secret: {secretName: {{ include "forage.auth.secret" (dict "root" $.root "component" .) }}, defaultMode: 0440}
{{- end }}
{{- if .root.Values.tls.enabled }}
- name: tls
  secret: {secretName: {{ include "forage.tls.secret" . }}, defaultMode: 0440}
{{- end }}
{{- end }}
