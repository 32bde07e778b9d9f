"""Runs a question once, or again at each event of the proxy (`--watch`).

Exit codes: 0 healthy, 1 a problem is shown, 3 the proxy does not answer, 130 interrupted. A watch continues while the
proxy is away, and shows the error in place of the answer.

On a terminal a watch uses the alternate screen, as less and top do: its end restores the terminal. Elsewhere it
prints each answer that differs from the last one; JSON on one line each.
"""

import asyncio
import errno
import json
import signal
import sys
from collections.abc import Callable
from contextlib import nullcontext

from rich.console import Console
from rich.live import Live
from rich.text import Text

from crust.core import errors
from crust.inspection import Format, daemon_calls, output, show

INTERRUPTED = 128 + signal.SIGINT

_REFRESH_S = 5.0
"""For facts without events: whether the drivers answer, and ages."""


def print_answers(run_dir: str, question: show.Question, form: Format, *, watch: bool) -> int:
    """Print the answer; returns the exit code."""
    try:
        if watch:
            asyncio.run(_watch(run_dir, question, form))
        return print_once(asyncio.run(show.answer(run_dir, question)), form)
    except KeyboardInterrupt:
        return INTERRUPTED
    except OSError as err:
        if err.errno != errno.EPIPE:
            raise
        # `| head` has ended: a flush of the buffer at exit must not fail again
        sys.stdout = None
        return 0


def print_once(answer: show.Shown, form: Format) -> int:
    """Print an answer; returns the exit code."""
    _printed(Console(), answer.rendered(form))
    return 0 if answer.healthy else 1


async def _watch(run_dir: str, question: show.Question, form: Format) -> None:
    console, last = Console(), ""
    is_screen = console.is_terminal and form != "json"
    screen = Live(console=console, screen=True, auto_refresh=False) if is_screen else nullcontext()
    with screen as live:

        def display(text: Text) -> None:
            nonlocal last
            if live is not None:
                text.no_wrap, text.overflow = True, "ellipsis"
                live.update(text, refresh=True)
            elif text.plain != last:
                last = text.plain
                one_line = form == "json" and last.startswith("{")
                _printed(console, Text(json.dumps(json.loads(last))) if one_line else text)

        while True:
            try:
                await _follow(run_dir, question, form, display)
            except errors.CrustError as error:
                display(Text(error.shown(), output.BAD))
            await asyncio.sleep(1)


async def _follow(
    run_dir: str, question: show.Question, form: Format, display: Callable[[Text], None]
) -> None:
    async with daemon_calls.inspecting(run_dir) as stub:
        events = await daemon_calls.events_of(stub)  # later changes are events
        event = asyncio.ensure_future(anext(events, None))
        try:
            while True:
                display((await question(stub, run_dir)).rendered(form))
                await asyncio.wait((event,), timeout=_REFRESH_S)
                if event.done():
                    if event.result() is None:
                        return
                    event = asyncio.ensure_future(anext(events, None))
        finally:
            event.cancel()


def _printed(console: Console, text: Text) -> None:
    if text.plain:
        console.print(text, soft_wrap=True, highlight=False)
        console.file.flush()
