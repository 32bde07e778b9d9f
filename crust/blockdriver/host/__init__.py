"""The kernel's and the programs' services that only this driver uses: one of them per file, as in `crust.host`.

No gRPC; an OSError becomes one of crust's errors here.
"""
