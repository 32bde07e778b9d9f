{{/* The settings files: TOML. A JSON value is one of TOML too. */}}

{{- define "crust.node.toml" -}}
# Written by the chart from its values. CRUST_NODE_NAME of the pod names the node.
log_format = "json"
metrics_address = {{ printf "0.0.0.0:%d" (int .Values.metricsPort) | toJson }} # of the pod: /metrics, and the probes' /healthz and /readyz
{{- include "crust.toml" .Values.node.settings }}

[proxy]
run_dir = {{ toJson .Values.runDir }}
volumes_root = {{ printf "%s/volumes" .Values.runDir | toJson }}
target_roots = {{ list .Values.kubeletRoot | toJson }}
plugins_registry = {{ printf "%s/plugins_registry" .Values.kubeletRoot | toJson }}
{{- if include "crust.runtimeClassDecides" . }}

[proxy.kubernetes] # volumes with crust.dev/defer: runtime-class
runtime_handlers = {{ include "crust.handlers" . }}
{{- end }}
{{- range include "crust.ownDrivers" . | fromJsonArray }}

[[proxy.drivers]]
name = {{ toJson .driverName }}
socket = {{ include "crust.socket" (list $ .driverName) | toJson }}
{{- end }}
{{- range .Values.wrapped }}

[[proxy.drivers]]
name = {{ toJson .name }}
socket = {{ include "crust.socket" (list $ .name) | toJson }}
backend = {{ include "crust.shimSocket" (list $ .name) | toJson }}
{{- with .defer }}
defer = {{ toJson . }}
{{- end }}
{{- end }}
{{- if and .Values.wrapped (include "crust.ownDrivers" . | fromJsonArray) }}

[[shim]] # in front of the first driver of crust
{{- end }}
{{- range .Values.wrapped }}

[[shim]]
socket = {{ include "crust.shimSocket" (list $ .name) | toJson }}
driver_socket = {{ .driverSocket | default (include "crust.socket" (list $ (printf "%s-inner" .name))) | toJson }}
kubelet_root = {{ toJson $.Values.kubeletRoot }}
{{- end }}
{{- if .Values.local.enabled }}

[[driver]]
driver_name = {{ toJson .Values.local.driverName }}
state_dir = {{ printf "%s/block" .Values.local.directory | toJson }}
create_pool = true # a node that had a pool never gets another one so
run_dir = {{ printf "%s/driver" .Values.runDir | toJson }}
target_roots = {{ list .Values.kubeletRoot | toJson }}
node_deployment = {{ not .Values.local.singleNode }}
{{- include "crust.toml" .Values.local.settings }}
{{- range .Values.local.pools }}
[driver.pools.{{ .name }}]
state_dir = {{ printf "%s/block" .directory | toJson }}
{{- include "crust.toml" .settings }}
{{- end }}
{{- end }}
{{- range .Values.ceph }}

[[driver]]
mode = "node"
engine = "rbd"
driver_name = {{ toJson .driverName }}
run_dir = {{ printf "%s/driver-%s" $.Values.runDir .name | toJson }}
target_roots = {{ list $.Values.kubeletRoot | toJson }}
{{- include "crust.toml" .settings }}
[driver.rbd] # no user and no key: they come with each call
monitors = {{ toJson .monitors }}
pool = {{ toJson .pool }}
namespace = {{ .namespace | default "" | toJson }}
{{- end }}
{{ end }}

{{/* The settings of a controller: context and the values of its driver. */}}
{{- define "crust.controller.toml" -}}
{{- $values := (index . 0).Values }}
{{- with index . 1 -}}
# Written by the chart from its values.
mode = "controller"
engine = "rbd"
driver_name = {{ toJson .driverName }}
log_format = "json"
{{- include "crust.toml" (pick (.settings | default dict) "csi_profile" "max_snapshots_per_volume" "reserve_snapshots") }}
{{- include "crust.toml" $values.controller.settings }}
metrics_address = {{ printf "0.0.0.0:%d" (int $values.metricsPort) | toJson }} # of the pod: /metrics, and the probes' /healthz and /readyz
socket = "/csi/crust/csi.sock" # what the sidecars call

[rbd]
monitors = {{ toJson .monitors }}
pool = {{ toJson .pool }}
namespace = {{ .namespace | default "" | toJson }}
user = {{ toJson .user }}
key_file = "/etc/crust-ceph/key"
create_pool = {{ .createPool | default false }}
trash_keep_s = {{ .trashKeepSeconds | default 0 | int }}
{{- if .fenceLostNodes }}

[kubernetes] # nodes with the taint node.kubernetes.io/out-of-service are cut off from their images
{{- end }}
{{ end }}
{{- end }}

{{- define "crust.toml" -}}
{{- range $key, $value := . }}
{{ $key }} = {{ toJson $value }}
{{- end }}
{{- end }}
