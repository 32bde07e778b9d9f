"""The attach-detach controller for one node, with the external-attacher: what happens if attachRequired is true.

A VolumeAttachment is made when a pod with the volume is bound to the node. The attacher calls ControllerPublishVolume
at the vendor's controller, not at the node's socket, and what that answers is the publish_context of the calls on the
node. The volume is detached when no pod object names it any more and the node does not report it in volumesInUse; if
the node goes on to report it, by force after six minutes (`force_after_s`; None: as newer clusters are set up).
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from tests.support.kubelet.clock import Clock
from tests.support.kubelet.state import Volume

NODE_STATUS_EVERY_S = 10.0
FORCE_AFTER_S = 360.0


class ControllerFailed(Exception):
    """The vendor's controller did not attach or detach: it is tried again."""


class NotAttached(Exception):
    """The kubelet waits for the attach-detach controller (VerifyControllerAttachedVolume)."""


class Controller(Protocol):
    """The vendor's controller."""

    async def attach(self, handle: str) -> Mapping[str, str]:
        """ControllerPublishVolume; returns the publish_context."""

    async def detach(self, handle: str) -> None:
        """ControllerUnpublishVolume."""


@dataclass
class Attachment:
    """A VolumeAttachment. `context` is None until it is attached."""

    volume: Volume
    context: Mapping[str, str] | None = None
    unwanted_since_s: float | None = None


class Attachments:
    """The VolumeAttachments of the node."""

    def __init__(
        self, controller: Controller, clock: Clock, *, force_after_s: float | None = None
    ) -> None:
        self._controller = controller
        self._clock = clock
        self._force_after_s = force_after_s
        self.all: dict[str, Attachment] = {}
        self.in_use: frozenset[str] = frozenset()
        self._next_status_s = 0.0

    def publish_context(self, volume: Volume) -> Mapping[str, str]:
        """What the calls on the node get; raises `NotAttached`. The kubelet has reported the volume in use before."""
        attachment = self.all.get(volume.name)
        if attachment is None or attachment.context is None or volume.name not in self.in_use:
            raise NotAttached(volume.name)
        return attachment.context

    async def turn(self, wanted: Iterable[Volume], in_use: Callable[[], Iterable[str]]) -> None:
        """One round: the node's status, if it is due; what is wanted is attached, what is not is detached."""
        if self._clock.now_s >= self._next_status_s:
            self.in_use = frozenset(in_use())
            self._next_status_s = self._clock.now_s + NODE_STATUS_EVERY_S
        named = {volume.name: volume for volume in wanted if not volume.ephemeral}
        for volume in named.values():
            await self._attach(volume)
        for name in [name for name in self.all if name not in named]:
            await self._detach(name)

    async def _attach(self, volume: Volume) -> None:
        attachment = self.all.setdefault(volume.name, Attachment(volume))
        attachment.unwanted_since_s = None
        if attachment.context is None:
            try:
                attachment.context = await self._controller.attach(volume.handle)
            except ControllerFailed:
                return

    async def _detach(self, name: str) -> None:
        attachment = self.all[name]
        if attachment.unwanted_since_s is None:
            attachment.unwanted_since_s = self._clock.now_s
        if name in self.in_use and not self._is_forced(attachment.unwanted_since_s):
            return
        try:
            await self._controller.detach(attachment.volume.handle)
        except ControllerFailed:
            return
        del self.all[name]

    def _is_forced(self, since_s: float) -> bool:
        return (
            self._force_after_s is not None and self._clock.now_s - since_s >= self._force_after_s
        )
