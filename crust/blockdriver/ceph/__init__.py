"""Ceph: connections, images of RBD, and the claims of their writers.

Two rules hold everywhere. Blocking calls run on a thread or in a process of their own, never on the event loop. And
an image has one writer in the cluster: a writer that may not have stopped is cut off before another one may write.
"""
