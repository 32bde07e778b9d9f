"""Runs a question once, or again at each event of the proxy (`--watch`).

The exit code says what was seen: 0 all is as it should be, 1 something is not, 3 the proxy does not answer, 130
interrupted. A watch goes on when the proxy goes away, and says so in the place of its answer.

On a terminal a watch has the alternate screen, as less and top have: its end restores what was there before.
Elsewhere it prints each answer that differs from the last one; JSON on one line each.
"""

import asyncio
import json
import signal
import sys
from collections.abc import Callable
from contextlib import ExitStack

from rich.console import Console
from rich.live import Live
from rich.text import Text

from crust.cli import asking, output
from crust.cli.inspecting import show
from crust.core import errors

INTERRUPTED = 128 + signal.SIGINT

_REFRESH_S = 5.0
"""What no event tells: whether the drivers answer, and ages."""


def print_answers(
    run_dir: str, question: show.Question, form: output.Format, *, watch: bool
) -> int:
    """Print the answer; returns the exit code."""
    try:
        if watch:
            asyncio.run(_watch(run_dir, question, form))
        return asyncio.run(_once(run_dir, question, form))
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # `| head` has seen enough; what is buffered must not fail again at exit
        sys.stdout = None
        return 0


def print_once(found: show.Shown, form: output.Format) -> int:
    """Print an answer; returns the exit code."""
    _printed(Console(), found.rendered(form))
    return 0 if found.healthy else 1


async def _once(run_dir: str, question: show.Question, form: output.Format) -> int:
    return print_once(await show.answer(run_dir, question), form)


async def _watch(run_dir: str, question: show.Question, form: output.Format) -> None:
    console = Console()
    with ExitStack() as stack:
        put = _putter(console, form, stack)
        while True:
            try:
                await _follow(run_dir, question, form, put)
            except errors.CrustError as error:
                put(Text(error.shown(), output.BAD))
            await asyncio.sleep(1)


async def _follow(
    run_dir: str, question: show.Question, form: output.Format, put: Callable[[Text], None]
) -> None:
    async with asking.inspecting(run_dir) as stub:
        each = await asking.events_of(stub)  # what changes from here on is an event
        event = asyncio.ensure_future(anext(each, None))
        try:
            while True:
                put((await question(stub, run_dir)).rendered(form))
                await asyncio.wait((event,), timeout=_REFRESH_S)
                if event.done():
                    if event.result() is None:
                        return
                    event = asyncio.ensure_future(anext(each, None))
        finally:
            event.cancel()


def _putter(console: Console, form: output.Format, stack: ExitStack) -> Callable[[Text], None]:
    """Shows an answer in the place of the last one, or after it."""
    if console.is_terminal and form != "json":
        live = stack.enter_context(Live(console=console, screen=True, auto_refresh=False))

        def replace(text: Text) -> None:
            text.no_wrap, text.overflow = True, "ellipsis"
            live.update(text, refresh=True)

        return replace
    last = ""

    def append(text: Text) -> None:
        nonlocal last
        if text.plain != last:
            last = text.plain
            one_line = form == "json" and last.startswith("{")
            _printed(console, Text(json.dumps(json.loads(last))) if one_line else text)

    return append


def _printed(console: Console, text: Text) -> None:
    if text.plain:
        console.print(text, soft_wrap=True, highlight=False)
        console.file.flush()
