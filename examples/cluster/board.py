"""The table that is shown below the steps while the demo runs: nodes and volumes as they are now.

Shown on a terminal alone; the steps and the closing table say the same to a log.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from rich.console import Console
from rich.live import Live
from rich.table import Table


@dataclass(slots=True)
class Board:
    """The scenario's latest text about each node and volume."""

    nodes: dict[str, str] = field(default_factory=dict)
    volumes: dict[str, tuple[str, str]] = field(default_factory=dict)
    _step: str = ""
    _live: Live | None = None

    @contextmanager
    def shown(self, console: Console) -> Iterator[None]:
        """Show the table below the printed lines, while the block runs."""
        with Live(console=console, transient=True, get_renderable=self._table) as live:
            self._live = live
            yield

    @contextmanager
    def step(self, title: str) -> Iterator[None]:
        """Show a step as the running one."""
        self._step = title
        self._refresh()
        try:
            yield
        finally:
            self._step = ""

    def node(self, name: str, state: str) -> None:
        """Set a node's state."""
        self.nodes[name] = state
        self._refresh()

    def volume(self, name: str, where: str, state: str) -> None:
        """Set a volume's place and state."""
        self.volumes[name] = (where, state)
        self._refresh()

    def deleted(self, name: str) -> None:
        """Remove a volume."""
        self.volumes.pop(name, None)
        self._refresh()

    def _refresh(self) -> None:
        if self._live is not None:
            self._live.refresh()

    def _table(self) -> Table:
        table = Table(title=self._step, title_justify="left")
        for column in ("what", "where", "state"):
            table.add_column(column)
        for name, state in self.nodes.items():
            table.add_row(f"node {name}", "", state)
        table.add_section()
        for name, (where, state) in self.volumes.items():
            table.add_row(name, where, state)
        return table
