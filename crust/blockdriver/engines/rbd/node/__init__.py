"""Images of Ceph as a node has them: devices of its kernel, claims in the pool, the users of volumes, fencing."""
