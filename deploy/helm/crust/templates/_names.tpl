{{- define "crust.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}{{ with .Values.image.digest }}@{{ . }}{{ end }}
{{- end }}

{{/* The labels of an object: context and the name of what it belongs to. */}}
{{- define "crust.labels" -}}
app.kubernetes.io/name: {{ index . 1 }}
app.kubernetes.io/part-of: crust
app.kubernetes.io/version: {{ (index . 0).Chart.AppVersion | quote }}
{{- end }}

{{/* The socket that the kubelet calls: context and the driver's name. */}}
{{- define "crust.socket" -}}
{{ (index . 0).Values.kubeletRoot }}/plugins/{{ index . 1 }}/csi.sock
{{- end }}

{{/* Between the parts of the one process: context and the driver's name. */}}
{{- define "crust.shimSocket" -}}
{{ (index . 0).Values.runDir }}/shim-{{ index . 1 }}/csi.sock
{{- end }}

{{/* crust's own drivers, the local one first, as JSON. */}}
{{- define "crust.ownDrivers" -}}
{{- $local := ternary (list .Values.local) (list) .Values.local.enabled -}}
{{ concat $local .Values.ceph | toJson }}
{{- end }}

{{/* All StorageClasses, as JSON. */}}
{{- define "crust.storageClasses" -}}
{{- $classes := list }}
{{- range concat (include "crust.ownDrivers" . | fromJsonArray) .Values.wrapped }}
{{- $classes = concat $classes (.storageClasses | default list) }}
{{- end }}
{{- toJson $classes }}
{{- end }}

{{- define "crust.handlers" -}}
{{- $handlers := list }}
{{- range .Values.runtimes }}{{ $handlers = append $handlers .handler }}{{ end }}
{{- toJson $handlers }}
{{- end }}

{{/* Not empty: a pod's RuntimeClass decides about some volumes. */}}
{{- define "crust.runtimeClassDecides" -}}
{{- $decides := .Values.runtimeClassDecides }}
{{- range concat (include "crust.storageClasses" . | fromJsonArray) .Values.wrapped }}
{{- if eq (.defer | default "") "runtime-class" }}{{ $decides = true }}{{ end }}
{{- end }}
{{- if $decides }}true{{ end }}
{{- end }}

{{/* Not empty: csi-snapshotter runs beside the driver of each node, and for this node alone. */}}
{{- define "crust.distributedSnapshots" -}}
{{- if and .Values.local.enabled .Values.snapshots.enabled (not .Values.local.singleNode) }}true{{ end }}
{{- end }}
