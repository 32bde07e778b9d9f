"""Log lines: constant messages, what varies as fields, the request's id on every line."""

import asyncio
import io
import json
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from crust.core import errors, logs

Lines = Callable[[], list[dict[str, object]]]


pytestmark = pytest.mark.usefixtures("logging_restored")


@pytest.fixture
def logged() -> Lines:
    """What is logged as JSON, line by line."""
    stream = io.StringIO()
    logs.configure(fmt="json", stream=stream)
    return lambda: [json.loads(line) for line in stream.getvalue().splitlines()]


def test_json_has_one_object_per_line_with_time_and_fields(logged: Lines) -> None:
    fields = {"volume": "v\n1", "count": 2, "value": {1}, "data": b"x"}
    logging.getLogger("crust.x").info("deferred", extra=fields)
    (line,) = logged()
    assert str(line.pop("time")).endswith("Z")
    shown = {"volume": "v\n1", "count": 2, "value": "{1}", "data": "b'x'"}
    assert line == {"level": "info", "logger": "crust.x", "message": "deferred", **shown}


def test_error_of_crust_is_logged_as_sentence_and_name(logged: Lines) -> None:
    logger = logging.getLogger("crust.x")
    logger.info("failed", extra={"error": errors.NotReady("no", why="so")})
    logger.info("failed", extra={"error": OSError(2, "nothing")})
    ours, other = logged()
    assert (ours["error"], ours["error_name"]) == ("no: so", "NotReady")
    assert other["error"] == "[Errno 2] nothing"
    assert "error_name" not in other


def test_queued_line_that_cannot_be_formatted_fails_no_caller() -> None:
    read, write = os.pipe()
    handler = logs.QueuedHandler(write, lambda: None)
    handler.setFormatter(logs.JsonFormatter())
    logging.getLogger().handlers[:] = [handler]
    logging.getLogger("library").warning("%s and %s", "hunter2")
    handler.flush()
    line = json.loads(os.read(read, 1000))
    assert (line["message"], line["error"]) == ("a log call failed", "TypeError")
    assert line["place"].partition(":")[0] == __file__
    assert "hunter2" not in str(line)
    os.close(read)
    os.close(write)


def test_traceback_stays_in_its_line(logged: Lines) -> None:
    try:
        raise ValueError("broken")
    except ValueError:
        logging.getLogger("crust.x").exception("unexpected")
    (line,) = logged()
    assert "ValueError: broken" in str(line["traceback"])


def test_console_shows_fields_in_one_line_of_the_level() -> None:
    stream = io.StringIO()
    logs.configure(level="warning", stream=stream)
    logging.getLogger("crust.x").info("hidden")
    logging.getLogger("crust.x").warning("shown", extra={"volume": "v", "error": "no\n12 INFO ok"})
    assert "WARN shown  volume=v" in stream.getvalue()
    assert stream.getvalue().count("\n") == 1


async def test_fields_of_context_are_on_each_line_of_task() -> None:
    stream = io.StringIO()
    logs.configure(stream=stream)

    async def call(number: int) -> None:
        logs.context.set({"request_id": f"r{number}"})
        await asyncio.sleep(0)
        logging.getLogger("crust.x").info("served", extra={"n": number})

    await asyncio.gather(call(1), call(2))
    logging.getLogger("crust.x").info("outside")
    text = stream.getvalue()
    assert "request_id=r1 n=1" in text
    assert "request_id=r2 n=2" in text
    assert "outside\n" in text


def read_lines(fd: int, until: str) -> list[dict[str, object]]:
    """The lines up to the one with this message."""
    lines: list[dict[str, object]] = []
    with open(fd, encoding="utf-8", closefd=False) as file:
        for line in file:
            lines.append(json.loads(line))
            if lines[-1]["message"] == until:
                break
    return lines


def test_log_that_is_not_read_blocks_nobody_and_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "QUEUE_BYTES", 200_000)
    reader, writer = os.pipe()
    dropped: list[None] = []
    logged = threading.Event()

    def log() -> None:
        with open(writer, "w", encoding="utf-8", closefd=False) as stream:
            logs.configure(fmt="json", stream=stream, on_drop=lambda: dropped.append(None))
        for number in range(1000):
            logging.getLogger("crust.x").info("served", extra={"n": number, "text": "x" * 1000})
        logged.set()

    threading.Thread(target=log, daemon=True).start()
    assert logged.wait(30), "a log line waits for its reader"
    kept_lines = read_lines(reader, "log lines dropped: their reader was too slow")
    logging.getLogger("crust.x").info("last")
    assert read_lines(reader, "last")[-1]["level"] == "info"
    kept, report = [line["n"] for line in kept_lines[:-1]], kept_lines[-1]
    # in order; a line may be kept after a dropped one, once the thread that writes has taken another
    assert kept == [number for number in range(1000) if number in kept]
    assert report["lines"] == 1000 - len(kept) == len(dropped) > 0
    os.close(reader)
    logging.getLogger("crust.x").info("to nobody")
    logging.getLogger().handlers[0].flush()


def test_exit_waits_for_the_last_line(tmp_path: Path) -> None:
    program = (
        "import logging, sys; from crust.core import logs; logs.configure(fmt='json');"
        "logging.info('first'); logging.error('cannot serve'); sys.exit(1)"
    )
    with open(tmp_path / "log", "wb") as log:
        done = subprocess.run([sys.executable, "-c", program], stderr=log, check=False)
    assert done.returncode == 1
    assert (tmp_path / "log").read_text().splitlines()[-1].count("cannot serve") == 1


def test_lines_to_the_journal_begin_with_their_priority(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    script = (
        "import logging, os; from crust.core import logs\n"
        "found = os.fstat(2); os.environ['JOURNAL_STREAM'] = f'{found.st_dev}:{found.st_ino}'\n"
        "logs.configure(level='debug')\n"
        "for level in (10, 20, 30, 40, 50): logging.getLogger('x').log(level, 'said')\n"
        "try: 1 / 0\n"
        "except ArithmeticError: logging.getLogger('x').exception('failed')\n"
    )
    with path.open("wb") as journal:
        subprocess.run([sys.executable, "-c", script], stderr=journal, check=True)
    lines = path.read_text().splitlines()
    assert [line[:3] for line in lines[:5]] == ["<7>", "<6>", "<4>", "<3>", "<2>"]
    assert len(lines) > 6  # a traceback
    assert {line[:3] for line in lines[5:]} == {"<3>"}


@pytest.mark.parametrize("journal", [{}, {"JOURNAL_STREAM": "1:2"}])
def test_lines_to_another_descriptor_than_the_journals_have_no_priority(
    journal: dict[str, str],
) -> None:
    script = (
        "import logging; from crust.core import logs\n"
        "logs.configure(); logging.getLogger('x').warning('said')"
    )
    others = {key: value for key, value in os.environ.items() if key != "JOURNAL_STREAM"}
    ended = subprocess.run(
        [sys.executable, "-c", script], env=others | journal, capture_output=True, check=True
    )
    assert ended.stderr.endswith(b"WARN said\n")
    assert not ended.stderr.startswith(b"<")
