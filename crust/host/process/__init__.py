"""Programs, system calls, deadlines for both, errno, sysfs, capabilities and the boot id."""
