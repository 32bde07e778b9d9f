"""The shim wraps one CSI driver of any vendor, and answers calls for deferred mounts in its place.

A deferred publish returns metadata and mounts nothing. Statistics and expansion of a deferred volume go back to the
proxy, and from there to the kernel that has it mounted. All other calls pass through to the driver, byte for byte.

The caller's flag says whether a call is about a deferred mount (the proxy sets it from its record). The shim calls a
driver that defers by itself with the flag (`deferral`). It wraps any other driver (`node_shim` chooses): that driver
stages and publishes the volume as a raw block device at private paths, whose existence is the only state.
"""
