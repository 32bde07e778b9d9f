"""The demo's output: a line per step while it runs, and a table at the end."""

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Literal

from rich.console import Console
from rich.padding import Padding
from rich.table import Table


class CheckFailed(Exception):
    """A check of the demo failed."""


@dataclass(slots=True)
class Step:
    """One step; `result` is a sentence, and `shown` is text to print below it."""

    title: str
    result: str = ""
    shown: str = ""
    seconds: float = 0.0
    ok: bool = False

    def found(self, result: str) -> None:
        """Set the step's result."""
        self.result = result

    def show(self, text: str) -> None:
        """Print a text below the step's line."""
        self.shown = text


@dataclass(slots=True)
class Report:
    """The steps, in order."""

    console: Console = field(default_factory=lambda: Console(highlight=False))
    steps: list[Step] = field(default_factory=list)
    running: Callable[[str], AbstractContextManager[object]] | None = None
    """Shows the running step; a spinner by default."""

    @contextmanager
    def step(self, title: str) -> Iterator[Step]:
        """Run a step, with a spinner where there is a terminal."""
        step = Step(title)
        self.steps.append(step)
        started = time.monotonic()
        try:
            with (self.running or self.console.status)(f"{title} …"):
                yield step
            step.ok = True
        except BaseException as error:
            step.result = f"{type(error).__name__}: {error}"
            raise
        finally:
            step.seconds = time.monotonic() - started
            mark = "[green]ok[/]" if step.ok else "[red]FAILED[/]"
            head = f" {mark}  {step.title}  [dim]{step.seconds:.2f} s[/]"
            self.console.print(head)
            for text in (step.result, step.shown):
                if text:
                    self.console.print(Padding(text, (0, 0, 0, 5)), markup=False)

    def table(self, title: str) -> None:
        """The closing table."""
        table = Table(title=title, title_justify="left")
        for column in ("step", "result", "time"):
            side: Literal["left", "right"] = "right" if column == "time" else "left"
            table.add_column(column, justify=side, overflow="fold")
        for step in self.steps:
            table.add_row(step.title, step.result, f"{step.seconds:.2f} s")
        table.add_section()
        table.add_row("total", "", f"{sum(step.seconds for step in self.steps):.2f} s")
        self.console.print(table)


def require(claim: str, holds: object) -> None:
    """Raise `CheckFailed` unless `holds`."""
    if not holds:
        raise CheckFailed(claim)
