"""Makes tests/data/nodes/<commit>.json: what the programs of an earlier commit leave on a node in use.

    git worktree add --detach <tree> <commit>
    unshare --mount --propagation private .venv/bin/python -m tests.support.records.freeze_node <tree>
    git worktree remove <tree>

The programs of the tree run as processes of their own: driver, shim and proxy for a volume of our driver, then shim
and proxy around the `cloud` and the `stateful` driver. A CO of this tree stages and publishes the volumes, deferred;
the claim of our driver's volume is made by the SDK of that tree. The file has each path as `frozen_pools` describes
it, the settings that each program of the tree knows, with their defaults, and its keeper.

The directory `frozen_nodes.ROOT` stands for the root of such a node: paths and digests are the same in each run.
"""

import asyncio
import json
import os
import re
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from crust.core.settings import OWN_DRIVER
from crust.csi_shim.wrap import private_directories
from crust.host.process import syscalls
from crust.rpc import channel
from crust.wire.csi.v1 import csi_pb2
from examples.drivers import cloud, disks
from tests.support import trees
from tests.support.co import MODE, NAMED, Co, capability
from tests.support.drivers import vendor_driver
from tests.support.nodes.places import Places
from tests.support.nodes.started_programs import RUN
from tests.support.records import frozen_nodes, frozen_pools
from tests.support.records.frozen_nodes import BOOT
from tests.support.records.frozen_pools import Frozen
from tests.support.runtimes import fake_handler

CLAIM = """
import sys
from crust.core import volumes
try:
    from crust.runtime_handler.blocking import claim_volume
except ImportError:  # an earlier SDK
    from crust.runtime_handler import claim_volume
target = volumes.TargetPath.parse(sys.argv[2])
claim = claim_volume(sys.argv[1], target, volumes.SandboxId("box-1"), volumes.HandlerName("kata"))
print("claimed", flush=True)
sys.stdin.read()
"""
"""A runtime of the tree, which has the volume until its input ends."""

SETTINGS = """
import importlib, json, tomllib, typing
import pydantic
from crust.cli.programs import PROGRAMS
from crust.core.settings.program import ProgramSettings

GIVEN = {
    "name": "csi.example.org", "socket": "/run/a.sock", "backend": "/run/b.sock", "node_id": "node-1",
    "driver_socket": "/run/c.sock", "runtime_handlers": ["kata"], "node_name": "node-1", "pool": "kubernetes",
    "monitors": "192.0.2.1:6789", "configuration": "/opt/kata/configuration.toml", "namespace": "crust",
    "kubeconfig": "/etc/kubeconfig", "key_file": "/etc/key", "engine": "rbd", "user": "csi",
}

def table(annotation):
    if isinstance(annotation, type) and issubclass(annotation, pydantic.BaseModel):
        return annotation
    return next(filter(None, map(table, typing.get_args(annotation))), None)

def toml(value):
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {toml(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(toml, value)) + "]"
    return json.dumps(value)

def values(model, of_process=()):
    found = {}
    for name, field in model.model_fields.items():
        if name in of_process or (model.__name__, name) == ("DriverSettings", "kubernetes"):
            continue  # the latter is for a controller alone
        default = field.get_default(call_default_factory=True)
        if (below := table(field.annotation)) is not None:
            table_values = values(below, ProgramSettings.model_fields)
            found[name] = [table_values] if "tuple" in str(field.annotation) else table_values
        elif name in GIVEN:
            found[name] = GIVEN[name]
        elif default is not None:
            found[name] = default
    return found

def text(settings):
    return "".join(f"{name} = {toml(value)}\\n" for name, value in settings.items())

models = {}
for name, program in PROGRAMS.items():
    if name == "node":
        continue  # its tables are those of the others
    module, _, model_name = program.model.partition(":")
    model = getattr(importlib.import_module(module), model_name)
    models[name] = text(values(model))
    model.model_validate(tomllib.loads(models[name]))
print(json.dumps(models))
"""
"""Prints the settings that each program of the tree knows, with their defaults, as TOML by program."""

KEEPER = """
import inspect, json, subprocess, sys
from pathlib import Path
try:
    from crust.runtime_handler.blocking import keepers, process_of
except ImportError:  # an earlier SDK
    from crust import runtime_handler
    from crust.runtime_handler import keepers
    process_of = getattr(runtime_handler, "process_of", int)  # or the pid
lines = []

class Recorded:
    @staticmethod
    def dumps(value):
        lines.append(value)
        return json.dumps(value)

    @staticmethod
    def loads(data):
        lines.append(json.loads(data))
        return lines[-1]

keepers.json = Recorded
over, new, back = (f"{sys.argv[1]}/{name}" for name in ("over", "new", "back"))
for path in (over, new, back):
    Path(path).write_text(path)
user = {"user": "box"} if "user" in inspect.signature(keepers.Keeper.put).parameters else {}
with subprocess.Popen(["sleep", "infinity"]) as vm:
    with keepers.start(Path(sys.argv[1], "socket"), process_of(vm.pid)) as keeper, open(over) as file:
        keeper.hold("one", [file.fileno()])
        keeper.put("one", over, new=new, back=back, **user)
        keeper.withdraw(over, **user)
        keeper.release("one")
    vm.kill()
print(json.dumps(list(zip(lines[::2], lines[1::2])), indent=1).replace(sys.argv[1], "DIRECTORY"))
"""
"""Prints the requests of a runtime of the tree to a keeper of the tree, each with its answer."""


def _python(tree: Path, code: str, *arguments: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-c", code, *arguments]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=tree, stdin=pipe, stdout=pipe, text=True)


@contextmanager
def running(tree: Path, *arguments: str) -> Iterator[None]:
    """A program of the tree; after the block it has ended."""
    with subprocess.Popen([sys.executable, "-c", RUN, *arguments], cwd=tree) as process:
        try:
            yield
        finally:
            process.terminate()


@contextmanager
def claimed(tree: Path, volumes_root: str, target: str) -> Iterator[None]:
    """A sandbox of a runtime of the tree has the volume."""
    with _python(tree, CLAIM, volumes_root, target) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "claimed\n"
        yield
        process.stdin.close()


@asynccontextmanager
async def served(tree: Path, places: Places, driver: str, behind: str = "") -> AsyncIterator[Co]:
    """The calls of a node of the tree: our driver, or one `behind` a socket."""
    lines = places.arguments(driver, behind=behind)
    sockets = {"driver": places.driver, "shim": places.shim, "proxy": places.csi}
    async with AsyncExitStack() as stack:
        for name in ("shim", "proxy") if behind else ("driver", "shim", "proxy"):
            stack.enter_context(running(tree, *lines[name]))
            connected = await stack.enter_async_context(channel.connect(sockets[name]))
            co = Co(connected, waits=True)
            await co.is_ready()
        handler = fake_handler.running(
            fake_handler.FakeHandler(),
            proxy_socket=places.sockets.handlers,
            endpoint=places.handler,
        )
        await stack.enter_async_context(handler)
        yield co


async def own(tree: Path) -> Frozen:
    """A volume of our driver, which a sandbox has."""
    places, given = frozen_nodes.places_of("own"), capability(mode=MODE.SINGLE_NODE_MULTI_WRITER)
    staging, target = frozen_nodes.staging(places), frozen_nodes.target(places)
    async with served(tree, places, OWN_DRIVER) as co:
        volume_id = (await co.create("pvc", given)).volume_id
        await co.stage(volume_id, staging, given)
        await co.publish(volume_id, target, given, staging=staging, volume_context=NAMED)
        with claimed(tree, places.volumes, target):
            frozen = frozen_pools.taken(Path(places.run))
        await co.unpublish(volume_id, target)
        await co.unstage(volume_id, staging)
    state = f"driver/{syscalls.boot_id()}"
    return {
        path.replace(state, f"driver/{BOOT}"): of
        for path, of in frozen.items()
        if path.startswith((state, "volumes/")) and path != "volumes/.writer.lock"
    }


async def wrapped(tree: Path, kind: str) -> Frozen:
    """The private directories of a volume of the driver."""
    places, given = frozen_nodes.places_of(kind), capability()
    staging, target = frozen_nodes.staging(places), frozen_nodes.target(places)
    secrets = {"token": cloud.TOKEN} if kind == "cloud" else {}
    with vendor_driver.running(kind, places.root) as driver:
        async with served(tree, places, vendor_driver.NAMES[kind], driver.socket) as co:
            volume_id = (await co.create("pvc", capability(block=True))).volume_id
            (image,) = driver.images()
            await asyncio.to_thread(disks.run, "mkfs.ext4", "-q", image)
            request = csi_pb2.ControllerPublishVolumeRequest(
                volume_id=volume_id, node_id=vendor_driver.NODE, volume_capability=given
            )
            answer = await co.controller.ControllerPublishVolume(request)
            fields: dict[str, Any] = {
                "publish_context": answer.publish_context,
                "volume_context": {"crust.dev/defer": "always", **NAMED},
            }
            await co.stage(volume_id, staging, given, **fields, secrets=secrets)
            await co.publish(volume_id, target, given, defer=False, staging=staging, **fields)
            frozen = frozen_pools.taken(Path(private_directories.root(places.kubelet)))
            await co.unpublish(volume_id, target)
            await co.unstage(volume_id, staging)
    private = re.compile("(staging/[^/]+|publish/[^/]+(/[^/]+)?)")  # and nothing of the driver
    return {path: of for path, of in frozen.items() if private.fullmatch(path)}


def keeper(tree: Path) -> Frozen:
    """The keeper's program, and what a runtime of the tree says to it."""
    with (
        trees.temporary("crust-") as directory,
        _python(tree, KEEPER, directory) as process,
    ):
        said, _ = process.communicate()
    assert process.returncode == 0
    program = (tree / "crust/runtime_handler/keeper.py").read_text()
    return {
        name: frozen_pools.FrozenPath("0644", len(text.encode()), text)
        for name, text in (("keeper.py", program), ("said.json", said))
    }


def settings(tree: Path) -> Frozen:
    """The settings of each program of the tree, and the file that it ships for `crust node`."""
    with _python(tree, SETTINGS) as process:
        out, _ = process.communicate()
    assert process.returncode == 0
    texts = {"node": (tree / "deploy/crust/node.toml").read_text(), **json.loads(out)}
    return {
        f"{program}.toml": frozen_pools.FrozenPath("0644", len(text.encode()), text)
        for program, text in texts.items()
    }


async def taken(tree: Path) -> dict[str, Frozen]:
    """The node of the tree, by part."""
    node = {
        "settings": await asyncio.to_thread(settings, tree),
        "keeper": await asyncio.to_thread(keeper, tree),
        "own": await own(tree),
    }
    for kind in ("cloud", "stateful"):
        node[kind] = await wrapped(tree, kind)
    return node


def main(tree: Path) -> None:
    """Write the file of the tree's commit."""
    head = ["git", "-C", str(tree), "rev-parse", "--short=8", "HEAD"]
    commit = subprocess.check_output(head, text=True).strip()
    with trees.temporary("crust-") as scratch, frozen_nodes.root_at(scratch):
        node = asyncio.run(taken(tree))
    described = {
        part: {path: asdict(of) for path, of in frozen.items()} for part, frozen in node.items()
    }
    (frozen_nodes.DATA / f"{commit}.json").write_text(f"{json.dumps(described, indent=1)}\n")


if __name__ == "__main__":
    os.umask(0o022)
    main(Path(sys.argv[1]).resolve())
