{{/* What the schema cannot say: how values depend on each other. */}}
{{- define "hocket.checks" -}}
{{- range $role := list "prefill" "decode" -}}
{{- $pool := index $.Values $role -}}
{{- if gt (int $pool.processesPerPod) (int $pool.cpus) -}}
{{- fail (printf "%s.processesPerPod is %v, but %s.cpus is only %v: every process needs one." $role $pool.processesPerPod $role $pool.cpus) -}}
{{- end -}}
{{- if and $pool.gpus (mod $pool.gpus $pool.processesPerPod) -}}
{{- fail (printf "%s.gpus is %v, which %s.processesPerPod (%v) does not divide." $role $pool.gpus $role $pool.processesPerPod) -}}
{{- end -}}
{{- $replica := include "hocket.replica" (dict "root" $ "role" $role) | fromJson -}}
{{- if ne (mul $replica.pods $pool.processesPerPod) (mul $replica.workers $replica.ranks) -}}
{{- fail (printf "config.decode.group_size is %v, decode.processesPerPod %v: one must divide the other." $replica.ranks $pool.processesPerPod) -}}
{{- end -}}
{{- if $.Values.autoscaling.enabled -}}
{{- if or (lt (int $pool.replicas) (int $pool.minReplicas)) (gt (int $pool.replicas) (int $pool.maxReplicas)) -}}
{{- fail (printf "%s.replicas is %v; it must be from %s.minReplicas (%v) to %s.maxReplicas (%v)." $role $pool.replicas $role $pool.minReplicas $role $pool.maxReplicas) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- $volume := .Values.modelVolume -}}
{{- $path := .Values.config.model.path | default "hocket-tiny" -}}
{{- if ne $path "hocket-tiny" -}}
{{- if eq $volume.type "none" -}}
{{- fail (printf "config.model.path is %q, but modelVolume.type is \"none\": nothing would be mounted there." $path) -}}
{{- end -}}
{{- if not (or (eq $path $volume.mountPath) (hasPrefix (printf "%s/" $volume.mountPath) $path)) -}}
{{- fail (printf "config.model.path is %q; it must lie below modelVolume.mountPath (%q)." $path $volume.mountPath) -}}
{{- end -}}
{{- end -}}
{{- $needed := dict "existingClaim" "claimName" "hostPath" "hostPath" -}}
{{- with get $needed $volume.type -}}
{{- if not (get $volume .) -}}
{{- fail (printf "modelVolume.type is %q: set modelVolume.%s." $volume.type .) -}}
{{- end -}}
{{- end -}}
{{- if and (eq $volume.type "emptyDir") (not (and $volume.fetch.image $volume.fetch.command)) -}}
{{- fail "modelVolume.type is \"emptyDir\": set modelVolume.fetch.image and .command, which fill it." -}}
{{- end -}}
{{- if and .Values.networkPolicy.enabled (not .Values.networkPolicy.extraEgress) -}}
{{- $away := "" -}}
{{- if eq $volume.type "emptyDir" }}{{ $away = "modelVolume.fetch" }}{{ end -}}
{{- if not (include "hocket.ownStore" .) }}{{ $away = "store.url" }}{{ end -}}
{{- if and .Values.gcsStore.enabled .Values.gcsStore.address }}{{ $away = "gcsStore.address" }}{{ end -}}
{{- if $away -}}
{{- fail (printf "%s leads out of this release, but networkPolicy denies that: allow it in networkPolicy.extraEgress." $away) -}}
{{- end -}}
{{- end -}}
{{- if and .Values.store.url .Values.store.urlSecret.name -}}
{{- fail "store.url and store.urlSecret.name are both set: one of them." -}}
{{- end -}}
{{- if and .Values.computeDomain.enabled (not (or .Values.prefill.gpus .Values.decode.gpus)) -}}
{{- fail "computeDomain.enabled is true, but neither prefill.gpus nor decode.gpus is set." -}}
{{- end -}}
{{- end }}
