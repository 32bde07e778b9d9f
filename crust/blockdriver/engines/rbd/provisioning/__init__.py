"""Images of Ceph as the controller has them: create, grow, delete, snapshot, copy, count."""
