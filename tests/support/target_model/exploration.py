"""All worlds that the calls about a target reach, and what happens without a call."""

from collections.abc import Iterator
from dataclasses import replace

from crust.proxy import target as decisions
from crust.proxy.target import (
    MountStack,
    TargetRow,
)
from tests.support.faults.choices import Choices
from tests.support.target_model.proxy import KilledError, Proxy
from tests.support.target_model.world import RECORD, World


def _started_again(world: World) -> World:
    """A start finishes the removal of an entry that was hidden."""
    if world.entry != "gone":
        return world
    stack = MountStack.CLEAR if world.stack is MountStack.GUARD else world.stack
    return replace(world, entry="", stack=stack)


def _check_settles(world: World, violations: set[str], *, is_inline: bool) -> None:
    """With nothing failing any more, an unpublish clears all once the sandbox ends, and a publish succeeds."""
    if world.entry in ("args", "vol", "bad"):
        return
    if world.tool:  # it ends by itself
        world = replace(world, tool=False, blank=False)
    quiet = Proxy(replace(world, held=False), Choices(), set(), is_inline, fails=False)
    if quiet.unpublish() != "OK" or quiet.violations:
        violations.add("an unpublish does not converge")
    if world.stack is MountStack.FOREIGN or (
        world.entry == "same" and world.stack is MountStack.BURIED
    ):
        return
    if is_inline and world.stack is MountStack.BURIED:
        return  # only a CO deletes it
    settled = replace(world, driver=world.driver or world.late, late=False)
    if Proxy(settled, Choices(), set(), is_inline, fails=False).publish() != "OK":
        violations.add("a publish does not converge")


def _runs(start: World, call: str, violations: set[str], *, is_inline: bool) -> Iterator[World]:
    """All runs of a call; yields the worlds that they leave."""
    script: list[int] | None = []
    while script is not None:
        choices = Choices(script)
        proxy = Proxy(start, choices, violations, is_inline)
        try:
            getattr(proxy, call)()
        except KilledError:
            proxy.world = _started_again(proxy.world)
        _check_settles(proxy.world, violations, is_inline=is_inline)
        yield proxy.world
        script = choices.following()


def _others(world: World) -> Iterator[World]:
    """What happens without a call."""
    if world.late:
        yield replace(world, late=False, driver=True)
    if world.tool:
        yield replace(world, tool=False, blank=False)
        yield replace(world, tool=False)
    if world.entry == "same":
        yield replace(world, held=not world.held)
        if world.stack is MountStack.GUARD:
            yield replace(world, stack=MountStack.CLEAR)
        row = TargetRow(RECORD.digest, entry=world.seen().entry, stack=world.stack)
        if decisions.needs_guard(row) and row.stack is MountStack.CLEAR:
            yield replace(world, stack=MountStack.GUARD)


def explore(*, is_inline: bool = False) -> tuple[int, int, set[str]]:
    """All worlds from an empty one and from some strange ones: their number, that of runs, the violations."""
    violations: set[str] = set()
    worlds: set[World] = set()
    todo = [
        World(),
        World(stack=MountStack.FOREIGN, driver=True),
        World(entry="args", stack=MountStack.GUARD, driver=True),
        World(entry="vol", stack=MountStack.GUARD),
        World(entry="bad", stack=MountStack.GUARD, driver=True),
    ]
    runs = 0
    while todo:
        world = todo.pop()
        if world in worlds:
            continue
        worlds.add(world)
        for call in ("publish", "unpublish"):
            left = list(_runs(world, call, violations, is_inline=is_inline))
            runs += len(left)
            todo += left
        todo += _others(world)
    return len(worlds), runs, violations
