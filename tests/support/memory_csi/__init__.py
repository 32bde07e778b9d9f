"""The services of the fake CSI driver (`tests.support.drivers.fake_driver`), in memory and without a kernel.

A mount is an entry of a table, which the conformance suite reads through `MemoryHost`. Each service is correct unless
one of its `faults` is on: names of broken rules, which the code of the service checks.
"""
