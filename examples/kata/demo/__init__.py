"""The demo: the life of a deferred volume from creation to deletion, step by step on this machine.

The demo acts as the kubelet. It starts driver, shim, proxy and the example runtime as processes below one temporary
directory, checks each step, and at the end checks that no loop device, mount, process or directory remains. It exits
non-zero if a check fails.
"""
