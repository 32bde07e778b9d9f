"""The commands for the driver's pools: `crust pool` and `crust ceph`."""
