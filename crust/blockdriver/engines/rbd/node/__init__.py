"""Images of Ceph as a node has them: the claim in the pool, the user of one volume, fencing."""
