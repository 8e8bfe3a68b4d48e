{{/*
Pod templates of the RayCluster. "hocket.pod" takes a dict: root; group (a Ray group's name); spec
(cpus, cpuRequest, memory, and for a pool gpus, rdma, ...); container (YAML that only this
group's container has); volumes (YAML of such volumes).
*/}}
{{- define "hocket.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end }}

{{- define "hocket.podSecurity" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
fsGroupChangePolicy: OnRootMismatch
seccompProfile:
  type: RuntimeDefault
{{- end }}

{{- define "hocket.pod" -}}
{{- $root := .root -}}
{{- $values := .root.Values -}}
{{- $spec := .spec -}}
{{- $isPool := has .group (list "prefill" "decode") -}}
{{- $rdma := ($spec.rdma | default dict).resource -}}
{{- $hasModel := and (ne .group "head") (ne $values.modelVolume.type "none") -}}
{{- $inDomain := and $isPool $spec.gpus $values.computeDomain.enabled -}}
metadata:
  labels:
    {{- include "hocket.podLabels" $root | nindent 4 }}
    app.kubernetes.io/component: {{ .group }}
    {{- if $inDomain }}
    hocket.clique-claimant: {{ include "hocket.claimant" $root }}
    {{- end }}
  {{- with .annotations }}
  annotations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  serviceAccountName: {{ include "hocket.name" $root }}{{ if ne .group "gateway" }}-nodes{{ end }}
  automountServiceAccountToken: {{ and (eq .group "gateway") $values.autoscaling.enabled }}
  enableServiceLinks: false
  terminationGracePeriodSeconds: {{ .graceSeconds }}
  securityContext:
    {{- include "hocket.podSecurity" $root | nindent 4 }}
  {{- with include "hocket.pullSecrets" $root }}
  {{- . | nindent 2 }}
  {{- end }}
  {{- with $spec.runtimeClassName }}
  runtimeClassName: {{ . }}
  {{- end }}
  {{- with $spec.nodeSelector }}
  nodeSelector:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $spec.tolerations }}
  tolerations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- if $inDomain }}
  {{- with include "hocket.cliqueAffinity" (dict "root" $root "affinity" $spec.affinity) }}
  affinity:
    {{- . | nindent 4 }}
  {{- end }}
  resourceClaims:
    - name: nvlink-channel
      resourceClaimTemplateName: {{ include "hocket.name" $root }}-nvlink-channel
  {{- else }}
  {{- with $spec.affinity }}
  affinity:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- end }}
  {{- if and $hasModel (eq $values.modelVolume.type "emptyDir") }}
  initContainers:
    - name: fetch-model
      image: {{ $values.modelVolume.fetch.image }}
      command: {{ toJson $values.modelVolume.fetch.command }}
      env:
        - {name: HOME, value: /tmp}
      securityContext:
        {{- include "hocket.containerSecurity" $root | nindent 8 }}
      volumeMounts:
        - {name: tmp, mountPath: /tmp}
        - {name: model, mountPath: {{ $values.modelVolume.mountPath | quote }}}
  {{- end }}
  containers:
    # KubeRay takes the first container for Ray's and adds `ray start`, probes and /dev/shm.
    - name: ray
      image: {{ include "hocket.image" $root }}
      imagePullPolicy: {{ $values.image.pullPolicy }}
      {{- with .container }}
      {{- . | nindent 6 }}
      {{- end }}
      env:
        # The root file system is read-only.
        - {name: HOME, value: /tmp}
        - {name: RAY_USAGE_STATS_ENABLED, value: "0"}
        # Ray's own default runs every process of ours at nice 15.
        - {name: RAY_worker_niceness, value: "0"}
        {{- with $values.networkPolicy.ucxPorts }}
        - {name: UCX_TCP_PORT_RANGE, value: "{{ int .first }}-{{ int .last }}"}
        {{- end }}
        {{- with .env }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      resources:
        requests:
          cpu: {{ $spec.cpuRequest | default (toString $spec.cpus) | quote }}
          memory: {{ $spec.memory }}
        limits:
          memory: {{ $spec.memory }}
          {{- if $isPool }}
          {{- if $spec.gpus }}
          {{ $spec.gpuResource }}: {{ int $spec.gpus }}
          {{- end }}
          {{- if $rdma }}
          {{ $rdma }}: {{ int $spec.rdma.count }}
          {{- end }}
          {{- end }}
        {{- if $inDomain }}
        claims:
          - name: nvlink-channel
        {{- end }}
      securityContext:
        {{- include "hocket.containerSecurity" $root | nindent 8 }}
        {{- if and $rdma $spec.rdma.ipcLock }}
          add: [IPC_LOCK]
        {{- end }}
      volumeMounts:
        - {name: tmp, mountPath: /tmp}
        {{- if $hasModel }}
        - {name: model, mountPath: {{ $values.modelVolume.mountPath | quote }}, readOnly: true}
        {{- end }}
        {{- with .mounts }}
        {{- . | nindent 8 }}
        {{- end }}
  volumes:
    - {name: tmp, emptyDir: {}}
    {{- if $hasModel }}
    {{- include "hocket.modelVolume" $root | nindent 4 }}
    {{- end }}
    {{- with .volumes }}
    {{- . | nindent 4 }}
    {{- end }}
{{- end }}

{{- define "hocket.modelVolume" -}}
{{- $name := include "hocket.name" . -}}
{{- with .Values.modelVolume -}}
- name: model
  {{- if eq .type "existingClaim" }}
  persistentVolumeClaim: {claimName: {{ .claimName }}, readOnly: true}
  {{- else if eq .type "claim" }}
  persistentVolumeClaim: {claimName: {{ $name }}-model, readOnly: true}
  {{- else if eq .type "hostPath" }}
  hostPath: {path: {{ .hostPath | quote }}, type: Directory}
  {{- else }}
  emptyDir: {}
  {{- end }}
{{- end }}
{{- end }}

{{/*
One NVLink clique for the pods of both pools, and no clique that another release has claimed:
its pods and ours then stay Pending with the scheduler's reason, instead of failing inside IMEX.
*/}}
{{- define "hocket.cliqueAffinity" -}}
{{- $values := .root.Values -}}
{{- $affinity := deepCopy (.affinity | default dict) -}}
{{- $claimant := include "hocket.claimant" .root -}}
{{- $key := "hocket.clique-claimant" -}}
{{- $ours := dict
      "labelSelector" (dict "matchLabels" (dict $key $claimant))
      "topologyKey" "nvidia.com/gpu.clique" -}}
{{- $near := get $affinity "podAffinity" | default dict -}}
{{- $required := "requiredDuringSchedulingIgnoredDuringExecution" -}}
{{- $preferred := "preferredDuringSchedulingIgnoredDuringExecution" -}}
{{- if eq $values.computeDomain.cliqueAffinity "required" -}}
{{- $near = set $near $required (append (get $near $required | default list) $ours) -}}
{{- else if eq $values.computeDomain.cliqueAffinity "preferred" -}}
{{- $near = set $near $preferred (append (get $near $preferred | default list) (dict "weight" 100 "podAffinityTerm" $ours)) -}}
{{- end -}}
{{- if $near }}{{ $_ := set $affinity "podAffinity" $near }}{{ end -}}
{{- if $values.computeDomain.exclusive -}}
{{- $others := dict
      "labelSelector" (dict "matchExpressions" (list
        (dict "key" $key "operator" "Exists")
        (dict "key" $key "operator" "NotIn" "values" (list $claimant))))
      "namespaceSelector" dict
      "topologyKey" "nvidia.com/gpu.clique" -}}
{{- $far := get $affinity "podAntiAffinity" | default dict -}}
{{- $far = set $far $required (append (get $far $required | default list) $others) -}}
{{- $_ := set $affinity "podAntiAffinity" $far -}}
{{- end -}}
{{- if $affinity }}{{ toYaml $affinity }}{{ end -}}
{{- end }}
