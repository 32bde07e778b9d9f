"""The controller's shim as a process, between the CSI sidecars' socket and the socket of the vendor's controller."""

import contextlib
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from crust.csi_shim.controller.frontend import ControllerShim, Users
from crust.deferral_keys import Defer
from crust.host.process import oserrors, workers
from crust.rpc import channel
from crust.rpc.driver_facts import DriverFacts
from crust.rpc.serving import server
from crust.rpc.serving.daemon import Daemon, starting
from crust.settings.loading import InvalidSettings
from crust.settings.shim import ShimSettings


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
        channel.connect(driver_socket) as driver,
        contextlib.aclosing(DriverFacts(driver)) as facts,
        starting(f"{socket_path}.lock") as daemon,
    ):
        shim = ControllerShim(driver, facts, default, users, driver_name)
        serves = server.serving(
            socket_path,
            name="controller shim",
            lock_path=None,
            generic=[shim.handler()],
            daemon=daemon,
            driver=facts.known_name,
        )
        async with serves, daemon.serves():
            yield daemon


async def run(settings: ShimSettings) -> None:
    """Serve until cancelled; raises as `serving` does, and `UnusableKubeconfig`."""
    async with (
        _users(settings) as users,
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
async def _users(settings: ShimSettings) -> AsyncIterator[Users | None]:
    if settings.kubernetes is None:
        yield None
        return
    try:
        from crust.kubernetes_api import api, volumes_in_use
    except ImportError as error:
        raise InvalidSettings(
            "shim", "kubernetes is set, and its client is missing: install crust-csi[kubernetes]"
        ) from error
    client = await workers.run(api.client, settings.kubernetes.kubeconfig)
    try:
        yield volumes_in_use.VolumesInUse(client, Defer(settings.defer))
    finally:
        await client.close()
