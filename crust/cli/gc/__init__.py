"""`crust gc`: settles publishes that a kubelet forgot, and only with proof that no process uses them.

A kubelet that was stopped while a pod was deleted removes the pod's directory at its start and never unpublishes the
pod's raw volumes: the next pod is refused for ever. The proof is a list of checks, each of which looks at one fact
on this node. If a check fails, gc touches nothing. Else it makes the kubelet's missing calls, NodeUnpublishVolume and
NodeUnstageVolume at the proxy, so the checks and locks of proxy and driver hold as well. Of the kubelet's own objects
it removes only the bind mount and the loop device, which keep the device busy.
"""
