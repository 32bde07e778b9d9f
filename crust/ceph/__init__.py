"""Ceph: connections, images of RBD, and who may write to one.

    binding         the two extension modules that a distribution ships, and what crust uses of them
    user            the user, cluster, key, and time for each call of a connection
    connection      one cluster and one user, in one process; `failures` turns what it raises into crust's errors
    omap            sorted keys on an object, changed by compare-and-swap
    controller_lock one controller changes a pool at a time; its client is the one client of crust
    cluster_image   who has an image open, and whose lock is on it
    claim_object    the claims on an image, read and replaced atomically; `claims`: take, record, give back
    attach          the same for a runtime, in a process per question
    fencing         clients that ended without closing an image, or are declared gone, are cut off

Two rules hold everywhere. What blocks is called on a thread or in a process of its own, never on the event loop. And
an image has one writer in the cluster: who cannot be shown to have stopped is cut off before another one may write.
"""
