"""Programs, system calls, deadlines for both, errno, attributes of sysfs and procfs, and the boot id."""
