"""Values of the chart for its tests: each choice, and what the choices leave out."""

from tests.support import chart

TENANT = """
  - name: team-a
    driverName: team-a.rbd.example.com
    monitors: "[v2:192.0.2.1:3300]"
    pool: kubernetes
    namespace: team-a
    user: team-a
    settings: {csi_profile: "1.13", max_volumes: 10, max_snapshots_per_volume: 20, reserve_snapshots: false}
    snapshotClass: team-a
    storageClasses:
      - name: team-a
        defer: never
        allowVolumeExpansion: true
        parameters: {csi.storage.k8s.io/node-stage-secret-name: "ceph-${pvc.namespace}"}
    volumeAttributesClasses:
      - {name: team-a, readIOPS: "0", writeIOPS: "0", readBytesPerSecond: "0", writeBytesPerSecond: "0"}
"""
WRAPPED = """
  - {name: csi.example.com, defer: always}
  - name: disk.example.com
    driverSocket: /data/kubelet/plugins/disk-vendor/csi.sock
    storageClasses: [{name: disk, defer: runtime-class, allowVolumeExpansion: true}]
"""
ALL = (
    chart.choice("ceph").replace("local: {enabled: false}\n", "").replace("snapshots:", f"{TENANT}snapshots:", 1)
    + f"""
wrapped: {WRAPPED}
name: store
image: {{repository: registry.example/crust, digest: "sha256:{"0" * 64}", pullSecrets: [registry]}}
kubeletRoot: /data/kubelet
runDir: /run/store
metricsPort: 9900
runtimes: [{{handler: kata, runtimeClass: kata-qemu}}]
local:
  directory: /data/crust
  driverName: disks.example.com
  pools:
    - {{name: fast, directory: /data/fast, settings: {{overcommit: 2, provisioning: thin}}}}
    - {{name: archive, directory: /data/old}}
  settings: {{overcommit: 1.5, max_volumes: 1000000, io_cgroup: "",
    provisioning: thick, reserve_snapshots: false, max_snapshots_per_volume: 100000}}
  snapshotClass: disks
  requiresRepublish: true
node: {{settings: {{log_level: debug, excepted_groups: [/system.slice/agent.service]}}, maxUnavailable: 10%}}
controller: {{settings: {{log_level: warning}}}}
sidecars: {{healthMonitor: {{enabled: true}}}}
monitoring: {{podMonitor: {{enabled: true, labels: {{release: prometheus}}}}, rules: {{enabled: true}}}}
"""
)  # fmt: skip
FORMS = {
    **{path.stem: path.read_text(encoding="utf-8") for path in sorted(chart.CHOICES.glob("*.yaml"))},
    "snapshots": "snapshots: {enabled: true}",
    "single-node-groups": "local: {singleNode: true}\nsnapshots: {enabled: true, groups: true}",
    "least": "sidecars: {resizer: {enabled: false}}\nlocal: {storageClasses: []}\nnetworkPolicy: {enabled: false}",
    "one-controller": chart.choice("ceph") + "controller: {replicas: 1}\n",
    "all": ALL,
}  # fmt: skip
