"""`crust status`, `volumes`, `handlers`, `drivers`, `describe`: their questions, and the health in the answers."""

import asyncio
import datetime
import json
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import TypeVar

from rich.text import Text

from crust.core import errors
from crust.host.process import arguments, open_files
from crust.inspection import Format, daemon_calls, output, views
from crust.inspection.daemon_calls import Stub
from crust.wire.v1 import inspect_pb2

Named = TypeVar("Named", views.DriverRow, views.HandlerRow, views.VolumeRow)


@dataclass(frozen=True, slots=True)
class Shown:
    """An answer in every format, and whether it shows a healthy state."""

    document: object
    names: tuple[str, ...]
    table: Callable[[bool], Text]
    healthy: bool = True

    def rendered(self, form: Format) -> Text:
        """The text of one format, without the last line's end."""
        if form == "json":
            return Text(output.document(self.document))
        if form == "yaml":
            import yaml  # for this format only

            plain = json.loads(output.document(self.document))
            return Text(yaml.safe_dump(plain, sort_keys=False).removesuffix("\n"))
        if form == "name":
            return Text("\n".join(self.names))
        return self.table(form == "wide")


_WARNINGS = ("ControlGroupsExcepted", "UnpublishRefused")
"""What the operator has excepted, and a pod that does not end: a new pod could start all the same."""

Question = Callable[[Stub, str], Awaitable[Shown]]
"""Asks the proxy. The second argument is the proxy's run directory."""


async def status(stub: Stub, _: str = "") -> Shown:
    """The whole node; healthy if a pod with a deferred volume could start now. A low pool is a warning."""
    node = await everything(stub)
    low = views.pool_problems(node.drivers, "low")
    return of_node(node, (*node.warnings, *views.outdated(node), *low))


def of_node(node: views.ProxyAnswer, warnings: tuple[views.Problem, ...] = ()) -> Shown:
    """The answer of `status`, from its parts. Warnings leave the node ready."""
    problems = (*node.problems, *_problems_of(node))
    document = {
        "ready": not problems, "problems": problems, "warnings": warnings, "drivers": node.drivers,
        "handlers": node.handlers, "volumes": node.volumes,
    }  # fmt: skip

    def table(wide: bool) -> Text:  # noqa: FBT001 - one flag, and its caller is above
        state = ("not ready", output.BAD) if problems else ("ready", output.GOOD)
        parts = [Text.assemble("crust is ", state)]
        if problems:
            parts.append(_section("Problems", output.table(views.PROBLEMS, problems, wide=wide)))
        if warnings:
            parts.append(_section("Warnings", output.table(views.WARNINGS, warnings, wide=wide)))
        for title, columns, rows in (
            # without the messages: the problems above have them
            ("Drivers", views.DRIVERS[:-1], node.drivers),
            ("Handlers", views.HANDLERS[:-1], node.handlers),
            ("Volumes", views.VOLUMES, node.volumes),
        ):
            parts.append(_section(title, output.table(columns, rows, wide=wide)))
        return Text("\n\n").join(parts)

    return Shown(document, tuple(each.component for each in problems), table, healthy=not problems)


def drivers(name: str = "", state: str = "") -> Question:
    """The drivers, each asked by Probe; healthy if the shown ones are ready."""
    return _listing(
        "drivers",
        drivers_of,
        views.DRIVERS,
        lambda row: name in ("", row.name) and state in ("", row.state),
        lambda row: row.state == "ready",
    )


def handlers(name: str = "") -> Question:
    """The registered handlers; healthy if the proxy can call them."""
    return _listing(
        "handlers",
        _handlers,
        views.HANDLERS,
        lambda row: name in ("", row.name),
        lambda row: not row.message,
    )


def volumes(
    *, driver: str = "", handler: str = "", state: str = "", target: str = "", pod: str = ""
) -> Question:
    """The deferred volumes; healthy if each entry can be read. An empty argument admits all.

    A target also admits the paths below it; a pod is a name, or the start of its UID.
    """

    def admits(volume: views.VolumeRow) -> bool:
        return (
            driver in ("", volume.driver)
            and handler in ("", volume.handler)
            and state in ("", volume.state)
            and volume.target_path.startswith(target)
            and (
                volume.pod_uid.startswith(pod) or pod in (volume.pod, volume.pod.partition("/")[2])
            )
        )

    return _listing(
        "volumes", volumes_of, views.VOLUMES, admits, lambda row: row.state != "unreadable"
    )


def _listing(
    key: str,
    list_rows: Callable[[Stub], Awaitable[tuple[Named, ...]]],
    columns: tuple[output.Column, ...],
    admits: Callable[[Named], bool],
    is_healthy: Callable[[Named], bool],
) -> Question:
    async def ask(stub: Stub, _: str) -> Shown:
        rows = tuple(filter(admits, await list_rows(stub)))
        names = tuple(dict.fromkeys(row.name for row in rows))
        healthy = all(map(is_healthy, rows))
        return Shown(
            {key: rows}, names, lambda wide: output.table(columns, rows, wide=wide), healthy
        )

    return ask


def describe(name: str) -> Question:
    """All facts about one volume, at each of its targets. Raises `PodAmbiguous`, `VolumeNotDeferred`."""

    async def ask(stub: Stub, run_dir: str) -> Shown:
        rows = await find(stub, name)
        return Shown(
            {"volumes": rows},
            tuple(row.entry for row in rows),
            lambda _: Text("\n\n").join(described(row, run_dir) for row in rows),
            healthy=all(row.state != "unreadable" for row in rows),
        )

    return ask


_HOW_TO_NAME = "`crust volumes` lists deferred volumes; give its id, its PersistentVolume, pod, target or entry"


async def find(stub: Stub, name: str, hint: str = _HOW_TO_NAME) -> tuple[views.VolumeRow, ...]:
    """The volume of that name, at each of its targets. Raises `PodAmbiguous`, `VolumeNotDeferred`, with the hint."""
    volumes = await volumes_of(stub)
    if rows := tuple(volume for volume in volumes if name and name in volume.names):
        pods = sorted({row.pod for row in rows if row.pod.endswith(f"/{name}")})
        if len(pods) > 1:
            what = f"{name} is the name of {len(pods)} pods"
            raise errors.InvalidRequest.named("PodAmbiguous", what, why=", ".join(pods))
        return rows
    why = "the handoff directory has no entry for it"
    if unreadable := sum(volume.state == "unreadable" for volume in volumes):
        why += f", but {unreadable} entries cannot be read: `crust volumes` names them"
    raise errors.NotFound.named(
        "VolumeNotDeferred", f"{name} is not deferred on this node", why=why, hint=hint
    )


async def everything(stub: Stub) -> views.ProxyAnswer:
    """The proxy's version, drivers, handlers, own problems, and the deferred volumes."""
    health, served, registered, entries = await asyncio.gather(
        stub.GetHealth(inspect_pb2.GetHealthRequest(), timeout=daemon_calls.ANSWER_S),
        drivers_of(stub),
        _handlers(stub),
        volumes_of(stub),
    )
    conditions = [views.row(views.Problem, condition) for condition in health.conditions]
    warnings = tuple(found for found in conditions if found.error_name in _WARNINGS)
    problems = tuple(found for found in conditions if found.error_name not in _WARNINGS)
    return views.ProxyAnswer(health.version, served, registered, problems, entries, warnings)


async def answer(run_dir: str, question: Question) -> Shown:
    """Ask the proxy once. Raises as `daemon_calls.inspecting`."""
    async with daemon_calls.inspecting(run_dir) as stub:
        return await question(stub, run_dir)


def _problems_of(node: views.ProxyAnswer) -> Iterable[views.Problem]:
    yield from views.pool_problems(node.drivers, "full")
    # of the drivers' processes; in one process with the proxy they are the proxy's too
    own = {problem.component for problem in node.problems}
    pools = [driver.pool for driver in node.drivers if driver.pool is not None]
    yield from (each for pool in pools for each in pool.conditions if each.component not in own)
    for driver in node.drivers:
        if driver.state != "ready":
            sentence = driver.message.removeprefix(f"[{driver.error_name}] ")
            yield views.Problem(f"driver {driver.name}", driver.error_name, sentence)
    if not node.handlers:
        message = (
            "no runtime handler is registered: every deferred publish is refused; start the runtime's daemon, "
            "`crust explain HandlerNotRegistered` says more"
        )
        yield views.Problem("handlers", "HandlerNotRegistered", message)
    for handler in node.handlers:
        if handler.message and f"runtime handler {handler.name}" not in own:
            yield _reported(handler)
    yield from views.unreadable(node.volumes)


def _reported(handler: views.HandlerRow) -> views.Problem:
    """A handler's message is text alone: its own report (GetProblems), or the proxy's error for a call that failed.

    The error's name stands in front, if it has one.
    """
    where, (name, separator, sentence) = f"handler {handler.name}", handler.message.partition("] ")
    if separator and name.startswith("["):
        return views.Problem(where, name[1:], sentence)
    return views.Problem(where, "", handler.message)


def described(row: views.VolumeRow, run_dir: str) -> Text:
    """One volume, a fact per line."""
    now = views.now()
    # the processes that this user may see: the runtime's, and the hypervisor
    holders = open_files.holders(f"{run_dir}/volumes/{row.entry}/claim.lock")
    return output.fields(
        (
            ("volume", row.volume_id),
            ("driver", row.driver),
            ("state", row.state),
            ("message", row.message),
            ("handler", row.handler),
            ("sandbox", row.sandbox_id),
            ("claimed by", f"process {row.claimed_by_pid}" if row.claimed_by_pid else ""),
            ("held by", ", ".join(f"{arguments.command_of(pid)}[{pid}]" for pid in holders)),
            ("claimed", _since(row.claimed_at, now)),
            ("published", _since(row.published_at, now)),
            ("request id", row.request_id),
            ("decided by", row.decided_by),
            ("target", row.target_path),
            ("pod", row.pod),
            ("pod uid", row.pod_uid),
            ("pv", row.pv),
            ("device", row.device),
            ("filesystem", row.fs_type),
            ("access", views.access(row)),
            ("size", f"{row.capacity_bytes} bytes" if row.capacity_bytes else ""),
            ("entry", f"{run_dir}/volumes/{row.entry}"),
        )
    )


def _since(moment: datetime.datetime | None, now: datetime.datetime) -> str:
    if moment is None:
        return ""
    return f"{moment.strftime('%Y-%m-%d %H:%M:%S')} UTC, {output.age(moment, now)} ago"


def _section(title: str, table: Text) -> Text:
    return Text.assemble((title, "bold"), "\n", table)


async def drivers_of(stub: Stub) -> tuple[views.DriverRow, ...]:
    return tuple(await asyncio.gather(*map(daemon_calls.probed, await daemon_calls.drivers(stub))))


async def _handlers(stub: Stub) -> tuple[views.HandlerRow, ...]:
    answered = await stub.ListHandlers(
        inspect_pb2.ListHandlersRequest(), timeout=daemon_calls.ANSWER_S
    )
    return tuple(map(views.HandlerRow.of, answered.handlers))


async def volumes_of(stub: Stub) -> tuple[views.VolumeRow, ...]:
    return tuple(map(views.VolumeRow.of, await daemon_calls.deferred(stub)))
