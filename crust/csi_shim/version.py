"""The version of the shim's process, in the trailing metadata of a Probe whose caller asks for it.

The driver's answer is passed on unchanged: GetPluginInfo is about the driver.
"""

import crust
from crust.rpc import passthrough
from crust.rpc.messages import extensions

PROBE = "/csi.v1.Identity/Probe"


def telling(unchanged: passthrough.UnaryBehaviour) -> passthrough.UnaryBehaviour:
    """A Probe that is passed on, and says which shim it has passed."""

    async def behave(data: bytes, context: passthrough.Context) -> bytes:
        answer = await unchanged(data, context)
        if extensions.versions_requested(context):
            drivers = tuple(context.trailing_metadata() or ())
            context.set_trailing_metadata((*drivers, (extensions.SHIM_VERSION, crust.__version__)))
        return answer

    return behave
