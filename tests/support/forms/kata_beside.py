"""What stands on a node in the place of containerd and of Kata, beside the unit `crust-kata`: a program of the node.

It serves the socket of containerd's plugins until its input ends. A line `claim TARGET` creates and starts a
container with that mount in a sandbox of its own, and prints the device that the sandbox got; its shim tells
statistics. A line `orphan TARGET` kills that shim then, and is answered when crust kata has written that into the
volume's claim. The line `kill TARGET` kills the sandbox's virtual machine, unless it has ended, and is answered when
its keeper has ended. A line `other TARGET` lists a running
container of another runtime and another user with that mount, and is answered when crust kata has ended it.
"""

import asyncio
import itertools
import subprocess
import sys
from collections.abc import Awaitable
from contextlib import suppress
from pathlib import Path

from crust.core import volumes
from crust.handoff.store import Store
from crust.handoff.watch import Watch
from crust.runtime_handler.blocking import keepers
from crust.wire.nri.v1alpha1 import nri_pb2
from tests.support import processes
from tests.support.kata import engine as engines
from tests.support.kata import sandbox, shim_monitor

NRI, SANDBOXES, KEEPERS = "/run/nri/nri.sock", Path("/run/vc/sbs"), Path("/run/crust/kata/keepers")
VOLUMES = "/run/crust/volumes"
STRANGER = 65534
AS_STRANGER = ("setpriv", f"--reuid={STRANGER}", f"--regid={STRANGER}", "--clear-groups")
WAIT_S = 20


async def serve() -> None:
    """Until the end of the input."""
    for directory in (Path(NRI).parent, SANDBOXES):
        directory.mkdir(parents=True, exist_ok=True)
    Path(NRI).unlink(missing_ok=True)
    engine = engines.Engine()
    async with engines.serving(NRI, engine):
        await _in_time(engine.registered.wait())
        _say("registered")
        for number in itertools.count():
            line = await asyncio.to_thread(sys.stdin.readline)
            if not line:
                return
            word, target = line.split()
            if word == "other":
                await _list_other(engine, target)
            else:
                await _run(engine, f"crust-forms-{number}", target)


async def _run(engine: engines.Engine, id_: str, target: str) -> None:
    """A container of a sandbox, until the next line."""
    entry = Store(VOLUMES).read(volumes.TargetPath.parse(target))
    assert entry is not None
    assert entry.record is not None
    device = entry.record.device
    monitor = shim_monitor.serving(SANDBOXES, id_, _statistics)
    with sandbox.running(SANDBOXES, id_) as one:
        pod = engines.pod(id_, pid=one.pid)
        app = engines.container((target, "/data"), pod_id=id_, id_=f"container-of-{id_}")
        await engine.create(pod, app)
        one.create_container(app.id, device, "/data")
        await engine.start(pod, app)
        async with monitor:
            _say(device)
            while (await asyncio.to_thread(sys.stdin.readline)).startswith("orphan "):
                one.shim.kill()
                await _in_time(_reported(target))
                _say("orphaned")
        with suppress(keepers.KeeperGone, ProcessLookupError):  # with the machine of an orphan
            with keepers.connect(KEEPERS / f"{id_}.sock") as keeper:
                pids = keeper.pids
            with processes.ending(*pids):
                one.kill()
    _say("killed")


async def _statistics(path: str) -> bytes:
    return shim_monitor.ok(b'{"usage":[{"available":500,"total":1000,"used":400,"unit":1}]}')


async def _reported(target: str) -> None:
    """Crust kata has looked at the shim, and again after its grace."""
    async with Watch(VOLUMES) as touched:
        async for _ in touched:
            entry = Store(VOLUMES).read(volumes.TargetPath.parse(target))
            assert entry is not None
            assert entry.claim is not None
            if "[SandboxOrphaned]" in entry.claim.error:
                return


async def _list_other(engine: engines.Engine, target: str) -> None:
    """The engine lists the container when the plugin comes back."""
    name = "crust-forms-other"
    scope = (
        "systemd-run",
        "--scope",
        "--quiet",
        "--collect",
        f"--unit={name}",
        f"--uid={STRANGER}",
    )
    program = (*scope, "sh", "-c", "echo runs; exec sleep infinity")
    process = await asyncio.create_subprocess_exec(*program, stdout=asyncio.subprocess.PIPE)
    assert process.stdout is not None
    await process.stdout.readline()  # it is in its control group, whose name has the container's id
    state = int(nri_pb2.CONTAINER_RUNNING)
    app = engines.container((target, "/data"), pod_id=f"pod-of-{name}", id_=name, state=state)
    app.pid = process.pid
    engine.pods, engine.containers = [engines.pod(f"pod-of-{name}", handler="runc")], [app]
    engine.disconnect()
    try:
        await _in_time(process.wait())
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    _say("killed")


async def _in_time(awaited: Awaitable[object]) -> None:
    """Await what crust kata does, or end with its log."""
    try:
        async with asyncio.timeout(WAIT_S):
            await awaited
    except TimeoutError:
        sys.exit(_log_of_kata())


def _log_of_kata() -> str:
    show = ("journalctl", "--unit=crust-kata", "--lines=8", "--output=cat")
    return subprocess.run(show, capture_output=True, text=True, check=True).stdout


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    asyncio.run(serve())
