"""What `crust cluster nodes` prints. The fields of a row are the keys of `-o json`, and stay (docs/api.md)."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from crust.cli import output
from crust.cli.inspecting import show
from crust.cli.output import BAD, GOOD, Column


@dataclass(frozen=True, slots=True)
class Row:
    """A pool, and its node as far as that is connected. `node` is empty for a retired pool."""

    node: str
    pool: str
    state: str
    free_bytes: int | None = None
    published: int | None = None
    segments: Mapping[str, str] = field(default_factory=dict)


_STATES = {"ready": GOOD, "not-ready": BAD, "absent": BAD, "other-pool": BAD}
_COLUMNS = (
    Column[Row]("node", lambda row: row.node),
    Column[Row]("pool", lambda row: row.pool),
    Column[Row]("state", lambda row: row.state, styles=_STATES),
    Column[Row]("free MiB", lambda row: _text(row.free_bytes, 1 << 20)),
    Column[Row]("volumes", lambda row: _text(row.published)),
    Column[Row]("segments", lambda row: ",".join(map("=".join, row.segments.items())), wide=True),
)


def shown(store: Any) -> show.Shown:
    """Every pool that the store knows, in every format."""
    connected = store.nodes()
    rows = [_row(pool, node, connected.get(node)) for pool, node in store.known_pools().items()]
    rows += [Row("", pool, "retired") for pool in store.retired_pools()]
    rows.sort(key=lambda row: (row.node, row.pool))
    return show.Shown(
        {"nodes": rows},
        tuple(dict.fromkeys(each.node or each.pool for each in rows)),
        lambda wide: output.table(_COLUMNS, rows, wide=wide),
    )


def _row(pool: str, node: str, said: Any) -> Row:
    if said is None or said.pool_id != pool:
        return Row(node, pool, "absent" if said is None else "other-pool")
    state = "ready" if said.is_ready else "not-ready"
    return Row(node, pool, state, said.capacity_bytes, said.volumes, dict(said.segments))


def _text(number: int | None, unit: int = 1) -> str:
    return "" if number is None else str(number // unit)
