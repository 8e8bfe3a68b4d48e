{{/*
Names and labels. The name of everything is at most 40 characters, so that what KubeRay and
Kubernetes append still fits; a longer one is cut and told apart by a digest.
*/}}
{{- define "hocket.name" -}}
{{- $name := .Values.fullnameOverride | default .Release.Name -}}
{{- if regexMatch "^[0-9]" $name }}{{ $name = printf "h-%s" $name }}{{ end -}}
{{- $name = replace "." "-" $name -}}
{{- if gt (len $name) 40 -}}
{{- printf "%s-%s" (trunc 31 $name | trimSuffix "-") (sha256sum $name | trunc 8) -}}
{{- else -}}
{{- $name -}}
{{- end -}}
{{- end }}

{{- define "hocket.labels" -}}
app.kubernetes.io/name: hocket
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end }}

{{/* What selects all pods of this release. KubeRay needs app.kubernetes.io/name for itself. */}}
{{- define "hocket.podLabels" -}}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/part-of: hocket
{{- end }}

{{- define "hocket.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end }}

{{- define "hocket.headAddress" -}}
{{ include "hocket.name" . }}-head-svc.{{ .Release.Namespace }}.svc.{{ .Values.clusterDomain }}:6379
{{- end }}

{{/* The gateway's open ports: a JSON list of name and port. */}}
{{- define "hocket.gatewayPorts" -}}
{{- $ports := list -}}
{{- range $name, $key := dict "grpc" "port" "http" "httpPort" "metrics" "metricsPort" -}}
{{- with get $.Values.gateway $key }}{{ $ports = append $ports (dict "name" $name "port" .) }}{{ end -}}
{{- end -}}
{{- toJson $ports -}}
{{- end }}

{{/* Whether the chart runs the server itself; "" is no. */}}
{{- define "hocket.ownStore" -}}
{{- if not (or .Values.store.url .Values.store.urlSecret.name) }}yes{{ end -}}
{{- end }}

{{- define "hocket.ownGcsStore" -}}
{{- if and .Values.gcsStore.enabled (not .Values.gcsStore.address) }}yes{{ end -}}
{{- end }}

{{/* Who claims NVLink cliques: the value of a pod label, also across namespaces. */}}
{{- define "hocket.claimant" -}}
{{ printf "%s-%s" (include "hocket.name" .) (sha256sum .Release.Namespace | trunc 8) }}
{{- end }}

{{- define "hocket.pullSecrets" -}}
{{- with .Values.image.pullSecrets -}}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
{{- end }}
