"""CSI drivers that share no code with crust, and know nothing of it: what a shim wraps in the tests.

Plain synchronous gRPC, threads, losetup(8), mount(8) and mkfs(8) as commands, state in JSON files. Of crust they use
the generated messages of CSI and nothing else. `cloud` behaves as the strict drivers of clouds do, `minimal` as the
smallest ones.
"""
