"""A conformance suite for CSI drivers: the specification's rules as numbered cases, against any driver on a socket.

The suite is a CO: it knows a socket, a directory for its staging and target paths, and the driver's capabilities. A
case is skipped only for a capability that is not advertised, or for an option that the operator did not give (a log,
a restart command), and the end of the output lists the skipped cases with the reason. The suite does not know crust's
own driver: this package imports the wire types, but no server.

The suite inspects mounts and files of the host, so it runs where the driver's mounts are visible: on the node, in the
driver's mount namespace. After each case, passed or failed, the suite removes the objects of the case: through the
driver first; then it unmounts the remaining mounts below the suite's own directory.

Cases are plain calls, not coroutines: a case waits for one answer at a time, and gRPC's futures make calls that must
overlap. The runner is pytest.
"""
