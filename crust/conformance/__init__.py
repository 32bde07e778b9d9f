"""A conformance suite for CSI drivers: the specification's rules as numbered cases, against any driver on a socket.

The suite is a CO: it knows a socket, a directory below which it stages and publishes, and what the driver advertises.
A case is skipped only for a capability that is not advertised, or for something that the operator did not give (a
log, a way to restart), and what was skipped is listed at the end with the reason. Nothing here knows crust's own
driver: this package imports the wire types and nothing that serves.

The suite inspects the host (is it mounted, what can be read from it), so it runs where the driver's mounts are
visible: on the node, in the driver's mount namespace. After each case, passed or failed, the suite removes what the
case created: through the driver first; what is then still mounted below the suite's own directory, it unmounts.

Cases are plain calls, not coroutines: a case waits for one answer at a time, and where several calls must overlap
gRPC's futures do that. It needs the extra `conformance`, which is pytest.
"""
