"""VMs without QEMU, for the example runtime."""
