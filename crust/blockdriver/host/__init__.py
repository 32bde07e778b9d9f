"""The kernel's and the programs' services that only this driver uses: one of them per file, as in `crust.host`.

    krbd, device_mounts                  images that the kernel maps, and the mounts of a device
    fsck, growth, usage, fsfreeze        a filesystem: repaired, grown, counted, frozen
    fs_group                             the group of a volume's files
    extents, file_copy                   the extents of a file, and its copy
    throttling                           I/O limits of control groups

No gRPC; an OSError becomes one of crust's errors here.
"""
