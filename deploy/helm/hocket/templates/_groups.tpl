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
