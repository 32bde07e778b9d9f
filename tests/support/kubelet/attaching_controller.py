"""A vendor's controller that attaches volumes to one node, and knows nothing of what runs there.

It is what an external-attacher calls, past every process on the node. What a volume's node part finds out about it is
the publish_context: a driver that is called without has no device.
"""

from collections.abc import Callable, Mapping

from tests.support.kubelet.attach import ControllerFailed

DEVICE = "device"


class AttachingController:
    """`attach.Controller`. `fails`: how many of the next calls fail; `on_detach` gets each detached volume."""

    def __init__(self, on_detach: Callable[[str], None] = lambda _: None) -> None:
        self.attached: set[str] = set()
        self.fails = 0
        self._on_detach = on_detach

    async def attach(self, handle: str) -> Mapping[str, str]:
        self._fail()
        self.attached.add(handle)
        return {DEVICE: handle}

    async def detach(self, handle: str) -> None:
        self._fail()
        self._on_detach(handle)
        self.attached.discard(handle)

    def _fail(self) -> None:
        if self.fails:
            self.fails -= 1
            raise ControllerFailed
