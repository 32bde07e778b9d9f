"""An entry of the list with a real guest: the example runtime on the node, and the microVMs that it starts."""

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

from crust.core import volumes
from crust.handoff.store import Store
from tests.support.booted_systemd import CHECKOUT
from tests.support.forms.form import TARGET, Form, staged

_RUNTIME = ("env", f"--chdir={CHECKOUT}", f"{CHECKOUT}/.venv/bin/python", "-m", "examples.kata")
_HERE = "--run-dir=/run/crust/example"
"""The proxy, in its pod, sees the handler's socket there."""
WRITE = "echo written >/data/file; sync; cat /data/file"


async def guests(form: Form) -> None:
    """A guest mounts the volume and writes to it; another guest reads it; the host mounts it at no time."""
    async with staged(form, runtime=runtime(form)) as volume:
        await volume.publish()
        entry = Store(form.seen("/run/crust/volumes")).read(volumes.TargetPath(TARGET))
        assert entry is not None
        device = entry.require().device
        assert device.startswith("/dev/loop")
        for script in (WRITE, "cat /data/file"):
            with guest(form, script):
                assert "ext4" in form.output("blkid", "-p", device)
                assert form.run("findmnt", "--source", device).returncode == 1  # not on the host
        await volume.unpublish()
        assert not form.is_mounted()


@asynccontextmanager
async def runtime(form: Form) -> AsyncIterator[None]:
    """The example runtime serves as the handler kata, and is registered when the block begins; its end kills it."""
    with form.running(*_RUNTIME, "serve", _HERE):
        await form.until_registered()
        yield


@contextmanager
def guest(form: Form, script: str = WRITE, target: str = TARGET) -> Iterator[None]:
    """A microVM that has the volume, and whose script has printed "written" when the block begins; it ends then."""
    of_guest = ("--sandbox=guest", f"--mount=source={target},destination=/data")
    command = (*_RUNTIME, "run", _HERE, *of_guest, "sh", "-c", f"{script}; exec sleep infinity")
    with form.running(*command) as running:
        assert running.stdout is not None
        line = running.stdout.readline()
        assert line == "written\n", line + running.stdout.read()
        yield
        form.output(*_RUNTIME, "stop", _HERE, "guest")
