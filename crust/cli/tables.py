"""What `crust status` and its sisters print."""

from collections.abc import Awaitable, Callable
from typing import TypeAlias

import click
import grpc.aio
from rich.console import Console
from rich.table import Table

from crust.rpc import channel
from crust.rpc import status as codes
from crust.wire.v1 import handlers_pb2, inspect_pb2, inspect_pb2_grpc

Stub: TypeAlias = "inspect_pb2_grpc.InspectAsyncStub"  # a name of the type stubs only
Part: TypeAlias = "Callable[[Stub], Awaitable[tuple[Table, bool]]]"
TIMEOUT_S = 5.0


async def status(socket: str) -> int:
    """Everything; exit code 1 if the proxy does not answer or is unhealthy, or an entry is broken."""
    return await _print(socket, _health, _drivers, _handlers, _volumes)


async def volumes(socket: str) -> int:
    """Deferred volumes."""
    return await _print(socket, _volumes)


async def handlers(socket: str) -> int:
    """Runtime handlers."""
    return await _print(socket, _handlers)


async def _print(socket: str, *parts: Part) -> int:
    console = Console()
    async with channel.connect(socket) as connected:
        stub = inspect_pb2_grpc.InspectStub(connected)
        try:
            tables = [await part(stub) for part in parts]
        except grpc.aio.AioRpcError as err:
            error = codes.to_error(err)
            click.echo(f"the proxy does not answer on {socket}: {error.shown()}", err=True)
            return 1
    for table, _ in tables:
        console.print(table)
    return 0 if all(healthy for _, healthy in tables) else 1


async def _health(stub: Stub) -> tuple[Table, bool]:
    answer = await stub.GetHealth(inspect_pb2.GetHealthRequest(), timeout=TIMEOUT_S)
    table = _table("Proxy", "part", "condition")
    for each in answer.conditions:
        table.add_row(each.part, f"[{each.error_name}] {each.message}")
    if not answer.conditions:
        table.add_row("all", "healthy")
    return table, not answer.conditions


async def _drivers(stub: Stub) -> tuple[Table, bool]:
    answer = await stub.ListDrivers(inspect_pb2.ListDriversRequest(), timeout=TIMEOUT_S)
    table = _table("Drivers", "name", "socket", "backend", "answers", "deferred")
    for each in answer.drivers:
        answers = "yes" if each.connected else "not yet"
        if each.registration:
            answers += f", {each.registration}"
        table.add_row(each.name, each.socket, each.backend, answers, str(each.deferred_volumes))
    return table, True


async def _handlers(stub: Stub) -> tuple[Table, bool]:
    answer = await stub.ListHandlers(inspect_pb2.ListHandlersRequest(), timeout=TIMEOUT_S)
    table = _table("Runtime handlers", "name", "version", "filesystems", "features", "since")
    for each in answer.handlers:
        names = (handlers_pb2.HandlerFeature.Name(number) for number in each.registration.features)
        features = ", ".join(
            name.removeprefix("HANDLER_FEATURE_").lower().replace("_", "-") for name in names
        )
        since = each.registered_at.ToDatetime().isoformat(" ", "seconds") + " UTC"
        known = ", ".join(each.registration.filesystems)
        table.add_row(each.registration.name, each.registration.version, known, features, since)
    return table, True


async def _volumes(stub: Stub) -> tuple[Table, bool]:
    answer = await stub.ListDeferredVolumes(
        inspect_pb2.ListDeferredVolumesRequest(), timeout=TIMEOUT_S
    )
    table = _table("Deferred volumes", "volume", "target", "handler", "device", "state", "sandbox")
    for each in answer.volumes:
        state = f"{each.state}: {each.message}" if each.message else each.state
        table.add_row(
            f"{each.driver}/{each.volume_id}" if each.volume_id else each.entry,
            each.target_path,
            each.handler,
            f"{each.device} {each.fs_type}{' ro' if each.readonly else ''}",
            state,
            each.sandbox_id,
        )
    return table, not any(each.state == "unreadable" for each in answer.volumes)


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column, overflow="fold")
    return table
