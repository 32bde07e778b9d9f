"""The options that commands for operators share, and a command that prints the answer to a question."""

import functools
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias, get_args

import click

from crust.inspection import Format

if TYPE_CHECKING:  # it imports rich, which would slow down each start of a daemon
    from crust.inspection import show

Command = Callable[..., None]
Question: TypeAlias = "show.Question"

RUN_DIR = click.option(
    "--run-dir", default="/run/crust", show_default=True, help="The proxy's run directory."
)
FORMAT = click.option(
    "-o",
    "--output",
    "form",
    type=click.Choice(get_args(Format)),
    default="table",
    show_default=True,
)
_WATCH = click.option("-w", "--watch", is_flag=True, help="Show every change, until Ctrl-C.")
_CODES = """\b
    Exit codes: 0 healthy, 1 a problem is shown, 2 the command cannot be understood,
    3 the proxy does not answer, 130 interrupted."""


def shows(ask: "Callable[..., Question | None]") -> Command:
    """A command that prints the answer to its question, once or at each change; for None it prints nothing."""

    @functools.wraps(ask)
    def command(run_dir: str, form: Format, *, watch: bool, **options: Any) -> None:
        if (question := ask(**options)) is not None:
            from crust.inspection import screen

            sys.exit(screen.print_answers(run_dir, question, form, watch=watch))

    command.__doc__ = f"{ask.__doc__}\n\n    {_CODES}"
    return RUN_DIR(FORMAT(_WATCH(command)))
