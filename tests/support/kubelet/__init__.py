"""A kubelet, simulated: what it asks of a CSI socket, in which order, and what it concludes from each answer.

It follows the volume manager of Kubernetes (desired and actual state, reconciler, nested pending operations, CSI
attacher and mounter), checked against its source and against the event log of a real kubelet 1.20. What makes it
worth more than a client that retries until OK: it *forgets*. A final status for a volume that was uncertain means to
to a kubelet that nothing exists, and it never unpublishes what it forgot.

    pending     simulated seconds; one operation at a time per volume, and the exponential back-off between failures
    state       pods and volumes: what is desired, what is actual, what is uncertain
    disk        the directories below /var/lib/kubelet, vol_data.json, removal of the target
    csi         the calls, each on a connection of its own, and the journal of their answers
    operations  mount, unmount, unmount device, expand
    kubelet     the reconciler; restart and reconstruction; statistics; republish

Left out, by name: SELinux, fsGroup by the kubelet's own chown, volume limits, and what a proxy on the node does not
see: attachments, subPath, and that an inline volume is one.
"""
