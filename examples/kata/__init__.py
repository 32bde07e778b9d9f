"""A Kata-style runtime on crust: a QEMU microVM mounts deferred volumes by itself.

`guest/` builds what boots and holds the agent that runs inside; `vm/` is the host's side of one VM.
"""
