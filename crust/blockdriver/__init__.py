"""The CSI driver of crust: block volumes of this machine or of a Ceph pool, for hosts and for microVMs.

`driver` composes. `services` decode, call and encode; `controller`, `node` and `snapshots` hold the rules, which
tests call without a server; `records` hold the state; `engines` store the bytes; `ceph` calls a cluster, and `host`
the kernel as far as only this driver needs it. The disk and the kernel are the truth: a restart at any line reads
both and continues.

A stage attaches the device and prepares its filesystem; it mounts nothing. Each publish decides whether the host or a
guest mounts it, and never both at once. A device is formatted only if its records prove that it is new.
"""
