"""A cluster under random faults: three nodes, two controllers of each driver, etcd with three members, Ceph."""
