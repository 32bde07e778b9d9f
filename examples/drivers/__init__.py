"""CSI drivers of another making, which know nothing of crust: a shim wraps them in the demo and in the tests.

Plain synchronous gRPC, threads, losetup(8), mount(8) and mkfs(8) as commands, state in JSON files. Of crust they use
the generated messages of CSI and nothing else. `cloud` behaves as the strict drivers of clouds do, `minimal` as the
smallest ones, and `stateful` as drivers that believe their own account of a volume's place.
"""
