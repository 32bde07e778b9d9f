"""The driver's controller for a cluster of local pools: a process that has no pool, touches no device, needs no root.

What the driver can do is asked of a driver that is composed and never opened; everything else goes to the nodes.
"""

import asyncio
import contextlib
import logging
import os
import secrets
from collections.abc import AsyncIterator

from crust import errors, metrics
from crust.blockdriver.driver import Driver
from crust.cluster.central.app import Central, Described
from crust.cluster.protocol import ControllerSide
from crust.host.files import durable
from crust.rpc.serving import server
from crust.rpc.serving.daemon import Daemon, starting
from crust.supervised import supervised

LOCK = "controller.lock"
"""In the run directory."""

_log = logging.getLogger(__name__)


class LeadershipFailed(errors.RuntimeFailed):
    """The controller's work as a leader, or on the way to it, failed in a way nobody expected."""

    def __init__(self) -> None:
        super().__init__(
            "this controller cannot lead",
            why="its leadership failed in a way that is a fault of crust",
            hint="it ends to be started again; report what its log says",
        )


def described(template: Driver, *, has_condition: bool) -> Described:
    """What a controller says of the nodes' drivers, by one of them that is never opened."""
    return Described(
        template.identity, template.controller, template.group_controller, has_condition
    )


@contextlib.asynccontextmanager
async def serving(
    store: ControllerSide,
    described_as: Described,
    *,
    name: str,
    socket: str,
    run_dir: str,
    settle_s: float,
) -> AsyncIterator[Daemon]:
    """The controller, on `socket` while the block runs. The process ends when its term as leader has.

    `settle_s` is how long nodes may take to announce themselves in an empty store.
    """
    await asyncio.to_thread(durable.make_directories, run_dir, 0o700)
    central = Central(store, described_as, settle_s=settle_s)
    async with (
        starting(os.path.join(run_dir, LOCK)) as daemon,
        server.serving(
            socket,
            *central.servicers(),
            name="controller",
            lock_path=os.path.join(run_dir, "socket.lock"),
            daemon=daemon,
            admit=central.calls.check,
            driver=lambda: name,
        ),
        supervised("leadership", lambda: _lead(central, daemon), daemon.health),
        daemon.serves(),
    ):
        daemon.readiness.append(central.problem)
        metrics.export_operations("controller", central.calls.running.running)
        _log.info("controller serves", extra={"driver": name, "socket": socket})
        yield daemon


async def _lead(central: Central, daemon: Daemon) -> None:
    # its own name each time: a controller that comes back is another candidate
    try:
        await central.lead(f"{os.uname().nodename}-{secrets.token_hex(4)}")
    except errors.CrustError as error:  # LeadershipLost at last
        daemon.end(error)
    except Exception:
        # without an end this process would be a standby for ever, and perhaps the only one
        _log.exception("the leadership failed")
        daemon.end(LeadershipFailed())
