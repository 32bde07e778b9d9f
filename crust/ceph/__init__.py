"""Ceph: connections, images of RBD, and who may write to one."""
