{{/*
Hocket's TOML file: the tables of `config`, and what follows from the other values.
Helm reads every number as a float; whole ones are written as integers, which Hocket takes for
both.
*/}}
{{- define "hocket.toml" -}}
{{- $name := include "hocket.name" . -}}
{{- $config := deepCopy .Values.config -}}
{{- range $role := list "prefill" "decode" -}}
{{- $pool := index $.Values $role -}}
{{- $replica := include "hocket.replica" (dict "root" $ "role" $role) | fromJson -}}
{{- $_ := set (index $config $role) "workers" (mul $pool.replicas $replica.workers) -}}
{{- $placement := dict
      "num_cpus" (divf $pool.cpus $pool.processesPerPod)
      "num_gpus" (divf $pool.gpus $pool.processesPerPod)
      "labels" (dict "hocket.pool" $role) -}}
{{- if gt (int $replica.ranks) 1 -}}
{{- $_ := set $placement "together" (gt (int $replica.pods) 1 | ternary "hocket.replica" "ray.io/node-id") -}}
{{- end -}}
{{- $_ := set (index $config $role) "placement" $placement -}}
{{- $limits := dict "max_workers" (mul $pool.replicas $replica.workers) -}}
{{- if $.Values.autoscaling.enabled -}}
{{- $limits = dict
      "min_workers" (mul $pool.minReplicas $replica.workers)
      "max_workers" (mul $pool.maxReplicas $replica.workers) -}}
{{- end -}}
{{- $_ := set $config.autoscaler $role $limits -}}
{{- end -}}
{{- $_ := set $config.autoscaler "enabled" .Values.autoscaling.enabled -}}
{{- $_ := set $config.gateway "host" "0.0.0.0" -}}
{{- $_ := set $config.gateway "port" .Values.gateway.port -}}
{{- $_ := set $config.gateway "http_port" (.Values.gateway.httpPort | default -1) -}}
{{- $_ := set $config.telemetry "metrics_host" "" -}}
{{- $_ := set $config.telemetry "metrics_port" (.Values.gateway.metricsPort | default -1) -}}
{{- $_ := set $config.cluster "ray_address" (include "hocket.headAddress" .) -}}
{{- if not .Values.store.urlSecret.name -}}
{{- $_ := set $config.redis "url" (.Values.store.url | default (printf "redis://%s-store:6379/0" $name)) -}}
{{- end -}}
{{- range $table, $keys := $config }}
{{- if $keys }}
{{- include "hocket.tomlTable" (dict "name" $table "keys" $keys) }}
{{- end }}
{{- end }}
{{- end }}

{{- define "hocket.tomlTable" -}}
[{{ .name }}]
{{ range $key, $value := .keys -}}
{{- if not (kindIs "map" $value) -}}
{{ $key }} = {{ include "hocket.tomlValue" $value }}
{{ end -}}
{{- end -}}
{{- $name := .name -}}
{{- range $key, $value := .keys -}}
{{- if kindIs "map" $value }}
[{{ $name }}.{{ $key }}]
{{ range $inner, $innerValue := $value -}}
{{ $inner }} = {{ include "hocket.tomlValue" $innerValue }}
{{ end -}}
{{- end -}}
{{- end }}
{{ end }}

{{- define "hocket.tomlValue" -}}
{{- if kindIs "string" . -}}
{{ toJson . }}
{{- else if kindIs "bool" . -}}
{{ . }}
{{- else if kindIs "map" . -}}
{{- $items := list -}}
{{- range $key, $value := . -}}
{{- $items = append $items (printf "%s = %s" (toJson $key) (include "hocket.tomlValue" $value)) -}}
{{- end -}}
{{ printf "{%s}" (join ", " $items) }}
{{- else if eq (float64 .) (float64 (int64 .)) -}}
{{ int64 . }}
{{- else -}}
{{ . }}
{{- end -}}
{{- end }}
