{{/* A Valkey server and its Service. Takes root, component (a part of the name), persistent. */}}
{{- define "hocket.valkey" -}}
{{- $root := .root -}}
{{- $values := .root.Values -}}
{{- $name := printf "%s-%s" (include "hocket.name" .root) .component -}}
{{- $arguments := ternary
      (list "--appendonly" "yes" "--appendfsync" "everysec")
      (list "--appendonly" "no" "--save" "")
      .persistent -}}
---
apiVersion: v1
kind: Service
metadata:
  name: {{ $name }}
  labels:
    {{- include "hocket.labels" $root | nindent 4 }}
spec:
  selector:
    {{- include "hocket.podLabels" $root | nindent 4 }}
    app.kubernetes.io/component: {{ .component }}
  ports:
    - name: redis
      port: 6379
      targetPort: redis
---
apiVersion: apps/v1
kind: StatefulSet
metadata:
  name: {{ $name }}
  labels:
    {{- include "hocket.labels" $root | nindent 4 }}
spec:
  replicas: 1
  serviceName: {{ $name }}
  {{- if .persistent }}
  persistentVolumeClaimRetentionPolicy: {whenDeleted: Delete, whenScaled: Retain}
  {{- end }}
  selector:
    matchLabels:
      {{- include "hocket.podLabels" $root | nindent 6 }}
      app.kubernetes.io/component: {{ .component }}
  template:
    metadata:
      labels:
        {{- include "hocket.podLabels" $root | nindent 8 }}
        app.kubernetes.io/component: {{ .component }}
    spec:
      serviceAccountName: {{ include "hocket.name" $root }}-nodes
      automountServiceAccountToken: false
      enableServiceLinks: false
      securityContext:
        {{- include "hocket.podSecurity" $root | nindent 8 }}
      {{- with include "hocket.pullSecrets" $root }}
      {{- . | nindent 6 }}
      {{- end }}
      containers:
        - name: valkey
          image: {{ $values.valkey.image }}
          command: [valkey-server]
          # Without a password: the NetworkPolicy lets only this release's pods in.
          args: {{ concat (list "--dir" "/data" "--protected-mode" "no" "--maxmemory-policy" "noeviction") $arguments | toJson }}
          ports:
            - {name: redis, containerPort: 6379}
          readinessProbe:
            exec:
              command: [sh, -c, "valkey-cli ping | grep -q PONG"]
            periodSeconds: 5
          livenessProbe:
            tcpSocket: {port: redis}
            periodSeconds: 10
          resources:
            requests: {cpu: {{ $values.valkey.cpuRequest | quote }}, memory: {{ $values.valkey.memory }}}
            limits: {memory: {{ $values.valkey.memory }}}
          securityContext:
            {{- include "hocket.containerSecurity" $root | nindent 12 }}
          volumeMounts:
            - {name: data, mountPath: /data}
      {{- if not .persistent }}
      volumes:
        - {name: data, emptyDir: {}}
      {{- end }}
  {{- if .persistent }}
  volumeClaimTemplates:
    - apiVersion: v1
      kind: PersistentVolumeClaim
      metadata:
        name: data
      spec:
        accessModes: [ReadWriteOnce]
        {{- with $values.gcsStore.storageClassName }}
        storageClassName: {{ . }}
        {{- end }}
        resources:
          requests:
            storage: {{ $values.gcsStore.size }}
  {{- end }}
{{- end }}
