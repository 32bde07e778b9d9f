"""The shim behind one CSI socket, as the proxy calls it.

The proxy's own calls belong to operations that outlive their caller, so they have a deadline of their own. Their
metadata is the caller's with the opt-in to deferral added. A status of the shim or its driver is raised unchanged
(`PeerStatus`), and the CSI service passes it on.
"""

from crust.rpc.call import Call, Metadata
from crust.rpc.driver_facts import DriverFacts
from crust.rpc.messages import extensions
from crust.rpc.port import Port, stub
from crust.wire.csi.v1 import csi_pb2_grpc

TIMEOUT_S = 110.0
"""Below a kubelet's two minutes per call."""


class Backend:
    """The port to the shim, its Node service, and what it says of the driver."""

    def __init__(self, port: Port) -> None:
        self.port = port
        self.facts = DriverFacts(port)
        self.node = stub(csi_pb2_grpc.NodeStub, port)

    async def aclose(self) -> None:
        """Close the port."""
        await self.facts.aclose()
        await self.port.aclose()


def opted_in(call: Call) -> Metadata:
    """The caller's metadata with the opt-in to deferral."""
    kept = (pair for pair in call.invocation_metadata() if pair[0] != extensions.KEY)
    return (*kept, *extensions.METADATA)
