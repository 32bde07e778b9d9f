"""The controller's shim as a process, between the CSI sidecars' socket and the socket of the vendor's controller."""

import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext

from crust.core import errors
from crust.core.deferral_keys import Defer
from crust.core.settings.shim import DetachAccess, ShimSettings
from crust.csi_shim.controller.controller_shim import ControllerShim
from crust.host.process import workers
from crust.kubernetes_api import api, volumes_in_use
from crust.rpc.csi_driver import CsiDriver
from crust.rpc.port import SocketPort
from crust.rpc.serving import server
from crust.rpc.serving.daemon import Daemon
from crust.rpc.serving.service import Service


@asynccontextmanager
async def part(settings: ShimSettings, daemon: Daemon) -> AsyncIterator[None]:
    """Serve as the process `daemon` while the block runs. Raises `DetachNotChecked`."""
    async with (
        users_of(settings) as users,
        SocketPort(settings.driver_socket) as port,
        contextlib.aclosing(CsiDriver(port)) as driver,
    ):
        shim = ControllerShim(driver, Defer(settings.defer), users, settings.driver_name)
        service = Service(
            "controller shim",
            shim.methods(),
            others=port,
            health=daemon.health,
            driver=driver.known_name,
        )
        followed = users.following(daemon.health) if users is not None else nullcontext()
        async with followed, server.serving(settings.socket, service, lock_path=None):
            yield


@asynccontextmanager
async def users_of(settings: ShimSettings) -> AsyncIterator[volumes_in_use.VolumesInUse | None]:
    """Knows who uses a volume; None if detaches are not to be checked. Raises `DetachNotChecked`."""
    if not settings.check_detach:
        yield None
        return
    access = settings.kubernetes or DetachAccess()
    try:
        client = await workers.run(api.client, access.kubeconfig)
    except api.UnusableKubeconfig as error:
        raise _cannot_check(error.why) from error
    users = volumes_in_use.VolumesInUse(client, Defer(settings.defer), access.node_absent_s)
    try:
        yield users
    finally:
        await client.close()


def _cannot_check(why: str) -> errors.InvalidRequest:
    return errors.InvalidRequest.named(
        "DetachNotChecked",
        "crust shim --controller cannot start: it would not know whether a guest uses what is detached",
        why=f"the Kubernetes API cannot be used: {why}",
        hint="run it in a pod with a service account, or set kubernetes.kubeconfig; where the CO is not Kubernetes "
        "and detaches nothing that is in use, set check_detach = false",
    )
