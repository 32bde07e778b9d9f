"""`crust gc`: settles what a kubelet forgot, and only with proof that nobody uses it.

A kubelet that was stopped while a pod was deleted removes the pod's directory at its start and never unpublishes the
pod's raw volumes: the next pod is refused for ever. The proof is a list of checks, each of which looks at one fact
on this node. If one of them fails, nothing is touched. What is done, is done by the calls that the kubelet owes:
NodeUnpublishVolume and NodeUnstageVolume at the proxy, whose and whose driver's own checks and locks hold as well.
Of the kubelet's own things only the bind mount and the loop device are removed, with which it keeps the device busy.
"""
