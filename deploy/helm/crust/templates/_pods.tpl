{{/* What the sidecars' containers have in common: context, the number of the port after metricsPort. */}}
{{- define "crust.sidecar" -}}
imagePullPolicy: IfNotPresent
ports:
  - {name: {{ index . 2 }}, containerPort: {{ add (index . 0).Values.metricsPort (index . 1) }}}
resources: {{ toJson (index . 0).Values.sidecars.resources }}
securityContext:
  readOnlyRootFilesystem: true
  allowPrivilegeEscalation: false
  capabilities: {drop: [ALL]}
  seccompProfile: {type: RuntimeDefault}
volumeMounts:
  - {name: csi, mountPath: /csi}
{{- end }}

{{/* The address of a sidecar's metrics: context, the number of its port. */}}
{{- define "crust.endpoint" -}}
--http-endpoint=:{{ add (index . 0).Values.metricsPort (index . 1) }}
{{- end }}

{{- define "crust.namespaceVariable" -}}
- name: NAMESPACE
  valueFrom: {fieldRef: {fieldPath: metadata.namespace}}
{{- end }}

{{/*
A process that hangs ends within a minute, as under WatchdogSec=60: the failures in a row, the last one's timeout, and a
grace that is not the pod's, because such a process does not stop in order. /healthz itself waits 5 s for the loop.
*/}}
{{- define "crust.probes" -}}
livenessProbe:
  httpGet: {path: /healthz, port: metrics}
  periodSeconds: 10
  timeoutSeconds: 6
  failureThreshold: 4
  terminationGracePeriodSeconds: 10
readinessProbe:
  httpGet: {path: /readyz, port: metrics}
  timeoutSeconds: 5
{{- end }}

{{/* Rules of a ClusterRole. */}}
{{- define "crust.rules.provisioner" -}}
- {apiGroups: [""], resources: [persistentvolumes], verbs: [get, list, watch, create, patch, delete]}
- {apiGroups: [""], resources: [persistentvolumeclaims], verbs: [get, list, watch, update]}
- {apiGroups: [""], resources: [events], verbs: [list, watch, create, update, patch]}
- {apiGroups: [storage.k8s.io], resources: [storageclasses, volumeattributesclasses], verbs: [get, list, watch]}
{{- if .Values.snapshots.enabled }}
# a PVC from a snapshot
- {apiGroups: [snapshot.storage.k8s.io], resources: [volumesnapshots], verbs: [get, list, watch, update]}
- {apiGroups: [snapshot.storage.k8s.io], resources: [volumesnapshotcontents], verbs: [get, list]}
{{- end }}
{{- end }}

{{- define "crust.rules.resizer" -}}
- {apiGroups: [""], resources: [persistentvolumes], verbs: [get, list, watch, patch]}
- {apiGroups: [""], resources: [persistentvolumeclaims], verbs: [get, list, watch]}
- {apiGroups: [""], resources: [persistentvolumeclaims/status], verbs: [patch]}
- {apiGroups: [""], resources: [pods], verbs: [get, list, watch]}
- {apiGroups: [""], resources: [events], verbs: [list, watch, create, update, patch]}
- {apiGroups: [storage.k8s.io], resources: [volumeattributesclasses], verbs: [get, list, watch]}
{{- end }}

{{- define "crust.rules.healthMonitor" -}}
- {apiGroups: [""], resources: [persistentvolumes, persistentvolumeclaims, nodes, pods], verbs: [get, list, watch]}
- {apiGroups: [""], resources: [events], verbs: [create, update, patch]}
{{- end }}

{{/* The rules of csi-snapshotter: context, and whether it takes groups. */}}
{{- define "crust.rules.snapshotter" -}}
- {apiGroups: [""], resources: [events], verbs: [list, watch, create, update, patch]}
- {apiGroups: [snapshot.storage.k8s.io], resources: [volumesnapshotclasses], verbs: [get, list, watch]}
- {apiGroups: [snapshot.storage.k8s.io], resources: [volumesnapshotcontents], verbs: [get, list, watch, update, patch]}
- {apiGroups: [snapshot.storage.k8s.io], resources: [volumesnapshotcontents/status], verbs: [update, patch]}
{{- if index . 1 }}
- {apiGroups: [groupsnapshot.storage.k8s.io], resources: [volumegroupsnapshotclasses], verbs: [get, list, watch]}
- {apiGroups: [groupsnapshot.storage.k8s.io], resources: [volumegroupsnapshotcontents], verbs: [get, list, watch, update, patch]}
- {apiGroups: [groupsnapshot.storage.k8s.io], resources: [volumegroupsnapshotcontents/status], verbs: [update, patch]}
{{- end }}
{{- end }}

{{/* The lease of a sidecar that elects its leader. */}}
{{- define "crust.rules.leases" -}}
- {apiGroups: [coordination.k8s.io], resources: [leases], verbs: [get, watch, list, delete, update, create]}
{{- end }}

{{/* A binding of a role to a service account of the release: context, kind of role, role, account. */}}
{{- define "crust.binding" -}}
apiVersion: rbac.authorization.k8s.io/v1
kind: {{ index . 1 }}Binding
metadata:
  name: {{ index . 2 }}
  {{- if eq (index . 1) "Role" }}
  namespace: {{ (index . 0).Release.Namespace }}
  {{- end }}
  labels: {{- include "crust.labels" (list (index . 0) (index . 3)) | nindent 4 }}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: {{ index . 1 }}, name: {{ index . 2 }}}
subjects:
  - {kind: ServiceAccount, name: {{ index . 3 }}, namespace: {{ (index . 0).Release.Namespace }}}
{{- end }}
