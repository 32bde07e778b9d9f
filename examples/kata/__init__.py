"""A Kata-style runtime on crust: the guest of a QEMU microVM mounts deferred volumes.

`guest/` builds the guest image and holds the agent that runs inside; `vm/` controls one VM from the host;
`runtime/` is the daemon that keeps sandboxes; `demo/` shows the life of a volume from creation to deletion.
"""
