"""A wrapped volume with one target, driven through every failure and kill of every step of publish and unpublish.

The code under test is `WrappedVolumes` with the decisions of `leaves`; disk and driver are a model. Checked after
each call: no call of the driver takes from a guest, no final code while something stands, and what is left converges.
"""

from collections.abc import Iterator
from dataclasses import astuple, dataclass, replace
from typing import Any, cast

import grpc
import grpc.aio
import pytest

from crust.core import errors, volumes
from crust.csi_shim.wrap import leaves
from crust.csi_shim.wrap.leaves import Kind, LeafState
from crust.csi_shim.wrap.private_directories import PrivatePaths
from crust.csi_shim.wrap.staging import Staging, Volume
from crust.csi_shim.wrap.wrapped import WrappedVolumes
from crust.host.process import workers
from crust.rpc import status
from crust.rpc.status import PeerStatus
from tests.support.co import publish_request
from tests.support.faults.choices import Choices
from tests.support.faults.crashes import Killed

KEY = volumes.VolumeKey(volumes.DriverName("csi.example.com"), volumes.VolumeId("v"))
PATHS = PrivatePaths.of("/nowhere", KEY)
TARGET = "/nowhere/pods/p/mount"
IDENTITY = volumes.DeviceIdentity(7, 1, 1)


@dataclass
class World:
    """Disk and driver. `is_late`: a publish that was answered with nothing, and is carried out later."""

    has_directory: bool = False
    leaf: str = "absent"
    is_published: bool = False
    guest: bool = False
    is_late: bool = False


class Model:
    """What the shim works on, with a choice at each step."""

    def __init__(self, world: World, choices: Choices) -> None:
        self.world = world
        self._choices = choices

    def _step(self, *options: str) -> str:
        chosen = self._choices.of([*options, "a bug", "kill before", "kill after"])
        if chosen == "kill before":
            raise Killed
        if chosen == "a bug":
            raise MemoryError
        return chosen

    def _ended(self, chosen: str) -> None:
        if chosen == "kill after":
            raise Killed
        if chosen == "final":
            raise PeerStatus(grpc.StatusCode.INTERNAL, "no")
        if chosen in ("lost", "late"):
            raise PeerStatus(grpc.StatusCode.UNAVAILABLE, "no")

    async def ensure_block(self, *_: object, **__: object) -> None:
        self._ended(self._step("ok", "final", "lost"))

    async def NodePublishVolume(self, *_: object, **__: object) -> None:
        world = self.world
        options = ["ok", "final", "lost", "no device"]
        options += [] if world.guest else ["late", "a directory", "final, mounted"]
        chosen = self._step(*options)
        if chosen in ("ok", "lost", "kill after", "final, mounted"):
            world.is_published, world.leaf = True, "device"
        if chosen == "a directory":
            world.is_published, world.leaf = True, "directory"
        if chosen == "no device":
            world.is_published = True
        world.is_late = world.is_late or chosen == "late"
        self._ended(chosen.partition(",")[0])

    async def NodeUnpublishVolume(self, *_: object, **__: object) -> None:
        world = self.world
        assert not world.guest, "the driver's unpublish under a live guest"
        chosen = self._step("ok", "final", "lost")
        if chosen != "final":
            world.is_published, world.leaf, world.is_late = False, "absent", False
        self._ended(chosen)

    async def check_unused(self, _: int) -> None:
        """The proxy's answer: whether a process writes to the device; it may be away."""
        if self.world.guest:
            raise errors.NotReady("a guest writes to it")
        self._ended(self._step("ok", "lost"))

    def look(self, _: str) -> LeafState:
        world = self.world
        kind = {"absent": Kind.ABSENT, "device": Kind.DEVICE, "directory": Kind.DIRECTORY}
        mounts = int(world.leaf != "absent")
        return LeafState(kind[world.leaf], 1, mounts, mounts, is_begun=world.has_directory)

    def release(self, path: str) -> int:
        mounts = self.look(path).mounts
        self.world.has_directory = self.world.has_directory and bool(mounts)
        return mounts

    def prepare(self, _: PrivatePaths, path: str) -> None:
        leaves.remove(path)
        self.world.has_directory = True

    def device(self, *_: object) -> tuple[volumes.BlockSource, int]:
        if self.world.leaf != "device":
            raise errors.RuntimeFailed("no block device")
        self._step("ok")
        return volumes.BlockSource("/dev/loop1", IDENTITY), 1 << 30


class Shim:
    """The shim's calls on a model; each returns "OK", "final" or "not final"."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._patch = patch
        self.runs = 0

    async def call(self, name: str, world: World, choices: Choices) -> str:
        model = Model(world, choices)
        for step in ("look", "release", "prepare", "device"):
            self._patch.setattr(leaves, step, getattr(model, step))
        shim = WrappedVolumes(cast("Any", model), cast("Staging", model), cast("Any", model))
        volume = Volume(PATHS, stages=True, onward={})
        self.runs += 1
        try:
            if name == "publish":
                await shim.publish_deferred(
                    volume, publish_request("v", TARGET, staging="/nowhere/g")
                )
            else:
                await shim.unpublish(volume, TARGET)
        except errors.CrustError as error:
            known = status.to_error(error) if isinstance(error, PeerStatus) else error
            is_final = status.branch_of(type(known)) not in status.NOT_FINAL
            return "final" if is_final else "not final"
        except MemoryError:  # of the unpublish: the interceptor answers INTERNAL
            return "final"
        except Killed:
            return "killed"
        return "OK"

    async def check_converges(self, world: World) -> None:
        """The guest has ended, nothing fails any more, and what was late has happened."""
        quiet = replace(world, guest=False)
        if quiet.is_late:
            quiet.is_late, quiet.is_published, quiet.leaf = False, True, "device"
        other = replace(quiet)
        assert await self.call("unpublish", quiet, Choices()) == "OK"
        assert (quiet.leaf, quiet.is_published, quiet.has_directory) == ("absent", False, False)
        assert await self.call("publish", other, Choices()) == "OK"
        assert (other.leaf, other.is_published) == ("device", True)


def _by_themselves(world: World) -> Iterator[World]:
    """What happens between calls: a guest starts or ends, a bind is lost, a late publish is carried out."""
    if world.leaf == "device" and world.is_published:
        yield replace(world, guest=not world.guest)
    if world.leaf == "device":
        yield replace(world, leaf="absent")
    if world.guest:
        yield replace(world, guest=False)
    if world.is_late:
        yield replace(world, is_late=False, is_published=True, leaf="device")


async def _explore(shim: Shim, start: World, name: str) -> Iterator[World]:
    reached: dict[tuple[object, ...], World] = {}
    script: list[int] | None = []
    while script is not None:
        world, choices = replace(start), Choices(script)
        answered = await shim.call(name, world, choices)
        if name == "publish" and answered == "final":
            stands = world.is_published or world.is_late or world.leaf != "absent"
            assert not stands, f"a final code while something stands: {start} {script} {world}"
        if name == "publish" and start.leaf == "device":
            assert world.is_published == start.is_published
        await shim.check_converges(world)
        reached[astuple(world)] = world
        script = choices.following()
    return iter(reached.values())


async def explore(patch: pytest.MonkeyPatch) -> tuple[int, int]:
    """Returns how many states were reached, and how many calls were made."""

    async def run(function: Any, *args: Any) -> Any:
        return function(*args)

    patch.setattr(workers, "run", run)
    shim, known = Shim(patch), set[tuple[object, ...]]()
    todo = [World()]
    while todo:
        world = todo.pop()
        if astuple(world) in known:
            continue
        known.add(astuple(world))
        todo += _by_themselves(world)
        todo += await _explore(shim, world, "publish")
        if not world.guest:  # the proxy refuses it before the shim is called
            todo += await _explore(shim, world, "unpublish")
    return len(known), shim.runs
