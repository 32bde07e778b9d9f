"""The controller's shim as a process, between the CSI sidecars' socket and the socket of the vendor's controller."""

import contextlib
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext

from crust.core import errors
from crust.core.deferral_keys import Defer
from crust.core.settings.shim import DetachAccess, ShimSettings
from crust.csi_shim.controller.controller_shim import ControllerShim, Users
from crust.host.process import oserrors, workers
from crust.kubernetes_api import api, volumes_in_use
from crust.rpc.csi_driver import CsiDriver
from crust.rpc.port import SocketPort
from crust.rpc.serving import server
from crust.rpc.serving.daemon import Daemon, starting
from crust.rpc.serving.service import Service


@asynccontextmanager
async def serving(
    *,
    socket_path: str,
    driver_socket: str,
    default: Defer,
    users: Users | None = None,
    driver_name: str = "",
) -> AsyncIterator[Daemon]:
    """Serve while the block runs. Raises what `server.serving` raises, before anything is served."""
    directory = os.path.dirname(socket_path)
    with oserrors.translating(f"cannot make the directory {directory}"):
        await workers.run(os.makedirs, directory, 0o700, exist_ok=True)
    async with (
        SocketPort(driver_socket) as port,
        contextlib.aclosing(CsiDriver(port)) as driver,
        starting(f"{socket_path}.lock") as daemon,
    ):
        shim = ControllerShim(driver, default, users, driver_name)
        service = Service(
            "controller shim",
            shim.methods(),
            others=port,
            health=daemon.health,
            driver=driver.known_name,
        )
        serves = server.serving(socket_path, service, lock_path=None)
        followed = users.following(daemon.health) if users is not None else nullcontext()
        async with followed, serves, daemon.serves():
            yield daemon


async def run(settings: ShimSettings) -> None:
    """Serve until cancelled; raises as `serving` does, and `DetachNotChecked`."""
    async with (
        users_of(settings) as users,
        serving(
            socket_path=settings.socket,
            driver_socket=settings.driver_socket,
            default=Defer(settings.defer),
            users=users,
            driver_name=settings.driver_name,
        ) as daemon,
    ):
        await daemon.forever()


@asynccontextmanager
async def users_of(settings: ShimSettings) -> AsyncIterator[Users | None]:
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
