{{- define "afterplay.runLabels" -}}
app.kubernetes.io/name: afterplay
app.kubernetes.io/instance: {{ .Values.name | quote }}
{{- end }}

{{- define "afterplay.labels" -}}
{{- include "afterplay.runLabels" .root }}
app.kubernetes.io/component: {{ .role }}
{{- end }}

{{- define "afterplay.metadata" -}}
name: {{ .root.Values.name }}-{{ .role }}
labels:
  {{- include "afterplay.labels" . | nindent 2 }}
{{- end }}

{{/* Of a Job or StatefulSet, which a queue may admit by its labels. */}}
{{- define "afterplay.workload" -}}
{{- include "afterplay.metadata" . }}
{{- with .root.Values.labels }}
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{/* One pod of a role at a time may be evicted, when nodes are drained. */}}
{{- define "afterplay.disruptions" -}}
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata:
  {{- include "afterplay.metadata" . | nindent 2 }}
spec:
  maxUnavailable: 1
  selector:
    matchLabels:
      {{- include "afterplay.labels" . | nindent 6 }}
{{- end }}

{{/* Another pod of a role while a metric of its pods exceeds an average, up to podsMax. */}}
{{- define "afterplay.autoscaler" -}}
apiVersion: autoscaling/v2
kind: HorizontalPodAutoscaler
metadata:
  {{- include "afterplay.metadata" . | nindent 2 }}
spec:
  scaleTargetRef:
    apiVersion: apps/v1
    kind: StatefulSet
    name: {{ .root.Values.name }}-{{ .role }}
  minReplicas: {{ (index .root.Values .role).pods }}
  maxReplicas: {{ (index .root.Values .role).podsMax }}
  metrics:
    - type: Pods
      pods:
        metric:
          name: {{ .metric }}
        target:
          type: AverageValue
          averageValue: {{ .average | quote }}
  behavior:
    scaleDown:
      stabilizationWindowSeconds: {{ .root.Values.autoscaling.quietSeconds }}
{{- end }}

{{/* Pods start again when the run file changes, which they read once. */}}
{{- define "afterplay.podMetadata" -}}
labels:
  {{- include "afterplay.labels" . | nindent 2 }}
annotations:
  checksum/config: {{ .root.Values.config | sha256sum }}
  {{- with (index .root.Values.pods .role).annotations }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end }}

{{- define "afterplay.guarded" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end }}

{{/* The same for the container of a role, which may be given capabilities. */}}
{{- define "afterplay.guardedRole" -}}
{{- include "afterplay.guarded" . }}
{{- with (index .root.Values.pods .role).capabilities }}
  add: {{ toJson . }}
{{- end }}
{{- end }}

{{/* Settings of a pod: no rights, a grace longer than its drain, and where it may run. */}}
{{- define "afterplay.pod" -}}
automountServiceAccountToken: false
enableServiceLinks: false
terminationGracePeriodSeconds: {{ (index .root.Values .role).graceSeconds | default .root.Values.graceSeconds }}
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile:
    type: RuntimeDefault
{{- with .root.Values.pullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with omit (index .root.Values.pods .role) "annotations" "env" "envFrom" "volumes" "volumeMounts" "resources" "capabilities" }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "afterplay.image" -}}
image: "{{ .root.Values.image.repository }}:{{ .root.Values.image.tag }}"
imagePullPolicy: {{ .root.Values.image.pullPolicy }}
securityContext:
  {{- include "afterplay.guarded" . | nindent 2 }}
{{- end }}

{{- define "afterplay.roleImage" -}}
image: "{{ .root.Values.image.repository }}:{{ .root.Values.image.tag }}"
imagePullPolicy: {{ .root.Values.image.pullPolicy }}
securityContext:
  {{- include "afterplay.guardedRole" . | nindent 2 }}
{{- with (index .root.Values.pods .role).envFrom }}
envFrom:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{/* GPUs are requested by their limit. Without one, a container sees none. What pods.ROLE.resources says comes first. */}}
{{- define "afterplay.resources" -}}
{{- $place := index .root.Values .role -}}
{{- $limits := dict -}}
{{- with $place.memoryLimit }}{{ $_ := set $limits "memory" . }}{{ end -}}
{{- with $place.gpus }}{{ $_ := set $limits "nvidia.com/gpu" (toString .) }}{{ end -}}
{{- $requests := dict "cpu" (toString $place.cpus) "memory" $place.memory -}}
{{- $given := deepCopy ((index .root.Values.pods .role).resources | default dict) -}}
resources:
  {{- toYaml (mergeOverwrite (dict "requests" $requests "limits" $limits) $given) | nindent 2 }}
{{- end }}

{{/* Variables of pods.ROLE.env, below those of the chart. */}}
{{- define "afterplay.env" -}}
{{- with (index .root.Values.pods .role).env }}
{{- toYaml . }}
{{- end }}
{{- end }}

{{- define "afterplay.mounts" -}}
- {name: config, mountPath: /etc/afterplay, readOnly: true}
- {name: runs, mountPath: /runs{{ if eq .role "actor" }}, readOnly: true{{ end }}}
- {name: tmp, mountPath: /tmp}
- {name: home, mountPath: /home/afterplay}
- {name: shm, mountPath: /dev/shm}
{{- with (index .root.Values.pods .role).volumeMounts }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "afterplay.volumes" -}}
- name: config
  configMap:
    name: {{ .root.Values.name }}-config
- name: runs
  persistentVolumeClaim:
    claimName: {{ .root.Values.runs.claim | default (printf "%s-runs" .root.Values.name) }}
- name: tmp
  emptyDir: {}
- name: home
  emptyDir: {}
- name: shm
  emptyDir:
    medium: Memory
{{- with (index .root.Values.pods .role).volumes }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* CURVE keys of a role. Afterplay refuses secret files that others can read, and a mounted secret is readable by the
group; so the pod's own keys are copied, and only the copy is mounted in the role's container. */}}
{{- define "afterplay.keysInit" -}}
- name: keys
  {{- include "afterplay.image" . | nindent 2 }}
  command: ["sh", "-ec"]
  args:
    - umask 077; cp {{ .files }} /keys/; chmod 600 /keys/*
  resources:
    requests: {cpu: 10m, memory: 32Mi}
    limits: {memory: 64Mi}
  volumeMounts:
    - {name: secret, mountPath: /secret, readOnly: true}
    - {name: keys, mountPath: /keys}
{{- end }}

{{- define "afterplay.keysVolumes" -}}
- name: secret
  secret:
    secretName: {{ .root.Values.name }}-{{ .role }}-keys
- name: keys
  emptyDir:
    medium: Memory
    sizeLimit: 16Mi
{{- end }}

{{- define "afterplay.engineKey" -}}
- name: {{ .variable }}
  valueFrom:
    secretKeyRef:
      name: {{ .root.Values.name }}-engine-keys
      key: {{ .key }}
{{- end }}

{{/* A role that answers no more is started again; before its first answer it has startSeconds. */}}
{{- define "afterplay.probes" -}}
startupProbe:
  httpGet: {path: {{ .path }}, port: {{ .port }}}
  periodSeconds: 5
  timeoutSeconds: 4
  failureThreshold: {{ div (add (index .root.Values .role).startSeconds 4) 5 }}
livenessProbe:
  httpGet: {path: {{ .path }}, port: {{ .port }}}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: {{ max 1 (div .root.Values.stuckSeconds 10) }}
{{- end }}

{{/* Pods of the run in these roles. */}}
{{- define "afterplay.peers" -}}
- podSelector:
    matchLabels:
      app.kubernetes.io/name: afterplay
      app.kubernetes.io/instance: {{ .name | quote }}
    matchExpressions:
      - {key: app.kubernetes.io/component, operator: In, values: [{{ join ", " .roles }}]}
{{- end }}
