{{/*
What a replica of a pool is, as JSON: ranks of a worker; pods, which live and die together; workers
that these hold. Takes a dict: root, role.
*/}}
{{- define "hocket.replica" -}}
{{- $perPod := int (index .root.Values .role).processesPerPod -}}
{{- $ranks := 1 -}}
{{- if eq .role "decode" }}{{ $ranks = int (.root.Values.config.decode.group_size | default 1) }}{{ end -}}
{{- $pods := max 1 (div $ranks $perPod) -}}
{{- toJson (dict "ranks" $ranks "pods" $pods "workers" (div (mul $pods $perPod) $ranks)) -}}
{{- end }}

{{/*
The group as it lives in the cluster, as JSON; {} when sizes are not the autoscaler's or nothing is
installed yet. An upgrade writes the whole list of groups, so it must write the size it finds, and
the pods that the autoscaler has already chosen to go.
*/}}
{{- define "hocket.liveGroup" -}}
{{- $found := dict -}}
{{- if .root.Values.autoscaling.enabled -}}
{{- $live := lookup "ray.io/v1" "RayCluster" .root.Release.Namespace (include "hocket.name" .root) -}}
{{- range dig "spec" "workerGroupSpecs" list ($live | default dict) -}}
{{- if eq .groupName $.group -}}
{{- $found = pick . "replicas" "scaleStrategy" -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- toJson $found -}}
{{- end }}

{{/* A pod of a pool. Takes a dict: root; group; pool, its values; pods of a replica. */}}
{{- define "hocket.poolPod" -}}
{{- $env := .pool.env -}}
{{- if gt .pods 1 -}}
{{- /* Ray keeps the ranks of a worker on nodes with one value of this label. */ -}}
{{- $label := dict "fieldRef" (dict "fieldPath" "metadata.labels['ray.io/worker-group-replica-name']") -}}
{{- $env = concat (list
      (dict "name" "HOCKET_REPLICA" "valueFrom" $label)
      (dict "name" "RAY_OVERRIDE_LABELS" "value" "{\"hocket.replica\": \"$(HOCKET_REPLICA)\"}")) $env -}}
{{- end -}}
{{- /* A pod that was drained and given back need not wait for its grace to be over. */ -}}
{{- $stop := dict "preStop" (dict "exec" (dict "command" (list "ray" "stop"))) -}}
{{- include "hocket.pod" (dict
      "root" .root "group" .group "spec" .pool "env" $env
      "container" (toYaml (dict "lifecycle" $stop))
      "graceSeconds" (int .pool.terminationGracePeriodSeconds)) -}}
{{- end }}

{{- define "hocket.gatewayPod" -}}
{{- $name := include "hocket.name" . -}}
{{- $ports := list -}}
{{- range include "hocket.gatewayPorts" . | fromJsonArray -}}
{{- $ports = append $ports (dict "name" .name "containerPort" (int .port)) -}}
{{- end -}}
{{- $container := dict
      "command" (list "bash" "/etc/hocket/gateway.sh")
      "ports" $ports
      "readinessProbe" (dict
        "grpc" (dict "port" (int .Values.gateway.port) "service" "hocket.v1.Generation")
        "periodSeconds" 5 "timeoutSeconds" 3 "failureThreshold" 2) -}}
{{- $env := list -}}
{{- with .Values.store.urlSecret -}}
{{- if .name -}}
{{- $env = list (dict "name" "HOCKET_REDIS_URL" "valueFrom" (dict "secretKeyRef" (dict "name" .name "key" .key))) -}}
{{- end -}}
{{- end -}}
{{- $volume := dict "name" "config" "configMap" (dict "name" (printf "%s-config" $name)) -}}
{{- $mount := dict "name" "config" "mountPath" "/etc/hocket" "readOnly" true -}}
{{- $drain := .Values.config.cluster.drain_s | default 10 -}}
{{- include "hocket.pod" (dict
      "root" . "group" "gateway" "spec" .Values.gateway "env" $env
      "annotations" (dict "ray.io/overwrite-container-cmd" "true")
      "container" (toYaml $container)
      "mounts" (toYaml (list $mount)) "volumes" (toYaml (list $volume))
      "graceSeconds" (add (ceil $drain) 30)) -}}
{{- end }}
