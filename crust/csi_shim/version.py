"""The version of the shim's process, in the trailing metadata of a Probe whose caller asks for it.

The driver's answer is passed on unchanged: GetPluginInfo is about the driver.
"""

import crust
from crust.rpc.call import Call
from crust.rpc.messages import extensions
from crust.rpc.port import Port
from crust.rpc.serving.service import Unary

PROBE = "/csi.v1.Identity/Probe"


def telling(driver: Port) -> Unary:
    """A Probe that is passed on, and says which shim it has passed."""

    async def probe(call: Call, data: bytes) -> bytes:
        answer = await driver.forward(call, data)
        if extensions.versions_requested(call):
            call.trailing = (*call.trailing, (extensions.SHIM_VERSION, crust.__version__))
        return answer

    return probe
