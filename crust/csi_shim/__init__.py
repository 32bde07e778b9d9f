"""The shim: wraps one CSI driver, and speaks for it whenever a mount is deferred.

A deferred publish answers with metadata and mounts nothing; statistics and expansion of such a volume go back to the
proxy, and from there to the kernel that has it mounted. Everything else is the driver's, byte for byte. The shim
keeps no state: the caller's flag says what is deferred (the proxy sets it from its record).
"""
