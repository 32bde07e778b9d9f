"""The shim: wraps one CSI driver and answers calls for deferred mounts in its place.

A deferred publish returns metadata and mounts nothing. Statistics and expansion of a deferred volume go back to the
proxy, and from there to the kernel that has it mounted. All other calls pass through to the driver, byte for byte.
The shim keeps no state: the caller's flag says whether a call is about a deferred mount (the proxy sets it from its
record).
"""
