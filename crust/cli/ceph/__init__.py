"""The commands about images of Ceph: claims, fencing, the capabilities of a user."""
