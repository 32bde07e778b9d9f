"""The steps that settle a proven orphan, in the order in which each can be repeated after a kill.

The file of the kubelet's bind goes last: as long as it is there, the next `crust gc` finds the orphan again.
"""

import os
from contextlib import suppress
from dataclasses import dataclass

from crust.cli import asking
from crust.cli.gc import proof
from crust.cli.gc.forgotten import Orphan
from crust.cli.gc.kernel import Kernel
from crust.core import errors
from crust.host.process import workers
from crust.rpc.port import SocketPort, stub
from crust.rpc.status import PeerStatus
from crust.wire.csi.v1 import csi_pb2, csi_pb2_grpc

TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class Plan:
    """What is done for one orphan. `why_staged`: why its volume must stay staged, if it must."""

    orphan: Orphan
    socket: str
    grace_s: float
    why_staged: str

    @property
    def unstage(self) -> bool:
        """Whether the volume is unstaged, too."""
        return bool(self.orphan.staging) and not self.why_staged

    def steps(self, kernel: Kernel) -> tuple[str, ...]:
        """The steps, in words. Blocks."""
        orphan = self.orphan
        loops = kernel.loops_of(orphan.mapped) if orphan.mapped else ()
        found = [f"detach the kubelet's loop device {loop}" for loop in loops]
        if orphan.mapped and os.path.lexists(orphan.mapped):
            found.append(f"unmount the kubelet's bind {orphan.mapped}")
        found.append(f"NodeUnpublishVolume {orphan.volume_id} {orphan.target}")
        if self.unstage:
            found.append(f"NodeUnstageVolume {orphan.volume_id} {orphan.staging}")
        elif orphan.staging:
            found.append(f"no NodeUnstageVolume: {self.why_staged}, whose kubelet will call it")
        return tuple(found)


def planned(orphan: Orphan, socket: str, grace_s: float) -> Plan:
    """The plan for a proven orphan, whose driver is at the socket. Blocks."""
    why = proof.why_staged(orphan, grace_s) if orphan.staging else ""
    return Plan(orphan, socket, grace_s, why)


async def settle(plan: Plan, kernel: Kernel) -> None:
    """Do it. Raises what the kernel, the proxy or the driver refuse; the rest is left then, for the next time."""
    orphan = plan.orphan
    if orphan.mapped:
        await workers.run(_release, orphan.mapped, kernel)
    async with SocketPort(plan.socket) as port:
        node = stub(csi_pb2_grpc.NodeStub, port)
        try:
            await node.NodeUnpublishVolume(
                csi_pb2.NodeUnpublishVolumeRequest(
                    volume_id=orphan.volume_id, target_path=orphan.target
                ),
                timeout=TIMEOUT_S,
            )
            if plan.unstage:
                await workers.run(_check_unused, plan)
                await node.NodeUnstageVolume(
                    csi_pb2.NodeUnstageVolumeRequest(
                        volume_id=orphan.volume_id, staging_target_path=orphan.staging
                    ),
                    timeout=TIMEOUT_S,
                )
        except PeerStatus as err:
            raise asking.answer_of(f"driver {orphan.driver}", plan.socket, err) from err
    if orphan.mapped:
        with suppress(FileNotFoundError):
            await workers.run(os.unlink, orphan.mapped)


def _check_unused(plan: Plan) -> None:
    """Look again: an unpublish may take minutes, in which a kubelet can have staged the volume for a new pod."""
    if why := proof.why_staged(plan.orphan, plan.grace_s):
        raise errors.NotReady.named(
            "VolumeInUseAgain",
            f"volume {plan.orphan.volume_id} stays staged at {plan.orphan.staging}",
            why=f"{why}, since the proof",
            hint="run crust gc again",
        )


def _release(mapped: str, kernel: Kernel) -> None:
    for each in kernel.loops_of(mapped):
        kernel.detach(each, mapped)
    kernel.unmount(mapped)
