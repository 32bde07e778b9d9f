"""Ceph: connections, images of RBD, and the claims of their writers.

    binding         the two extension modules that a distribution ships, and the part of them that crust uses
    user            the user, cluster, key, and time for each call of a connection
    connection      one cluster and one user, in one process; `failures` turns its errors into crust's
    omap            sorted keys on an object, changed by compare-and-swap
    controller_lock one controller changes a pool at a time; its client is the one client of crust
    cluster_image   the clients that have an image open, or have librbd's lock on it
    claim_object    the claims on an image, read and replaced atomically; `claims`: take, record, give back
    attach          the same for a runtime, in a process per attach or detach
    fencing         cuts off clients that ended without closing an image, or are declared gone

Two rules hold everywhere. Blocking calls run on a thread or in a process of their own, never on the event loop. And
an image has one writer in the cluster: a writer that may not have stopped is cut off before another one may write.
"""
