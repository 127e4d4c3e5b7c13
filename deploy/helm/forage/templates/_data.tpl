{{/* The volumes and the init containers that fill them. */}}

{{/* Of containers with the data volume: there the relative paths of a recipe begin, which are those of a checkout. */}}
{{- define "forage.workingDir" -}}
workingDir: /data
{{- end }}

{{- define "forage.shared.claim" -}}
{{- default (printf "%s-shared" (include "forage.fullname" .)) .Values.storage.shared.existingClaim -}}
{{- end }}

{{- define "forage.retriever.volume" -}}
{{- $data := .Values.retriever.data -}}
- name: data
  {{- if eq $data.kind "claim" }}
  persistentVolumeClaim: {claimName: {{ $data.existingClaim }}}
  {{- else if eq $data.kind "shared" }}
  persistentVolumeClaim: {claimName: {{ include "forage.shared.claim" . }}}
  {{- else if eq $data.kind "ephemeral" }}
  ephemeral:
    volumeClaimTemplate:
      spec:
        accessModes: [ReadWriteOnce]
        {{- with $data.storageClassName }}
        storageClassName: {{ . }}
        {{- end }}
        resources: {requests: {storage: {{ $data.size }}}}
  {{- else if eq $data.kind "memory" }}
  emptyDir: {medium: Memory, sizeLimit: {{ $data.size }}}
  {{- else }}
  emptyDir: {sizeLimit: {{ $data.size }}}
  {{- end }}
{{- end }}

{{/* The entries of `fetch` for a part, as YAML; empty if there are none. */}}
{{- define "forage.fetches" -}}
{{- $entries := list -}}
{{- range .root.Values.fetch }}
{{- if has $.component .for }}{{ $entries = append $entries (pick . "url" "path") }}{{ end }}
{{- end }}
{{- with $entries }}{{ toJson . }}{{ end }}
{{- end }}

{{/* "true" if a part reads or writes an object store: it fetches, its settings have an address, or it has credentials. */}}
{{- define "forage.usesObjectStore" -}}
{{- $values := .root.Values -}}
{{- $trainer := default dict $values.settings.trainer -}}
{{- $addresses := list (dig "redis" "payloads_url" "" $values.settings) -}}
{{- if ne .component "console" }}{{ $addresses = append $addresses (dig "publish" "uri" "" $trainer) }}{{ end -}}
{{- if eq .component "trainer" }}{{ $addresses = append $addresses (dig "upload_url" "" $trainer) }}{{ end -}}
{{- $used := or $values.objectStore.existingSecret $values.objectStore.env (join "" $addresses) -}}
{{- if or (include "forage.fetches" .) (and (has .component (list "rollout" "trainer" "console")) $used) }}true{{ end }}
{{- end }}

{{/* The first two are idempotent and do not touch complete copies. Sidecars of yours end with the part, a Job's too. */}}
{{- define "forage.initContainers" -}}
{{- $root := .root -}}
{{- $world := and $root.Values.world.enabled (has .component (list "retriever" "trainer")) -}}
{{- $fetches := include "forage.fetches" . -}}
{{- $sidecars := (index $root.Values .component).extraContainers -}}
{{- if or $world $fetches $sidecars -}}
initContainers:
  {{- if $world }}
  - name: world
    {{- include "forage.container" (dict "root" $root "image" $root.Values.cli.image) | nindent 4 }}
    # Written to a temporary name and renamed: pods that share the volume may do so concurrently, with the same content.
    command: [sh, -ec]
    args:
      - |
        test ! -e /data/world || exit 0
        staging=$(mktemp -d /data/.world-XXXXXX)
        forage data world --out "$staging/world"
        mv -T "$staging/world" /data/world || test -e /data/world/manifest.json
        rm -rf "$staging"
    env:
      - {name: HOME, value: /tmp}
    resources:
      {{- toYaml $root.Values.cli.resources | nindent 6 }}
    volumeMounts:
      - {name: data, mountPath: /data}
      - {name: tmp, mountPath: /tmp}
  {{- end }}
  {{- if $fetches }}
  - name: fetch
    {{- if $root.Values.fetcher.image.repository }}
    {{- include "forage.container" (dict "root" $root "image" $root.Values.fetcher.image) | nindent 4 }}
    {{- else }}
    {{- include "forage.container" . | nindent 4 }}
    {{- end }}
    command: [python, /etc/forage/fetch/fetch.py, /data]
    args:
      {{- range ($fetches | fromJsonArray) }}
      - {{ printf "%s=%s" .path .url | quote }}
      {{- end }}
    env:
      - {name: HOME, value: /tmp}
      {{- with $root.Values.objectStore.env }}
      {{- toYaml . | nindent 6 }}
      {{- end }}
    {{- with $root.Values.objectStore.existingSecret }}
    envFrom:
      - secretRef: {name: {{ . }}}
    {{- end }}
    {{- include "forage.resources" (merge (dict "of" $root.Values.fetcher.resources) .) | nindent 4 }}
    volumeMounts:
      - {name: data, mountPath: /data}
      - {name: tmp, mountPath: /tmp}
      - {name: fetch, mountPath: /etc/forage/fetch, readOnly: true}
  {{- end }}
  {{- range $sidecars }}
  {{- mergeOverwrite (dict "restartPolicy" "Always") . | list | toYaml | nindent 2 }}
  {{- end }}
{{- end }}
{{- end }}
