"""Log lines: constant messages, what varies as fields, the request's id on every line."""

import asyncio
import io
import json
import logging
from collections.abc import Iterator

import pytest

from crust import errors, logs


@pytest.fixture(autouse=True)
def _root_logger() -> Iterator[None]:
    """Leave the root logger as it was."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


def test_json_has_one_object_per_line_with_time_level_logger_and_fields() -> None:
    stream = io.StringIO()
    logs.configure(fmt="json", stream=stream)
    logging.getLogger("crust.x").info("deferred", extra={"volume": "v\n1", "count": 2})
    (line,) = stream.getvalue().splitlines()
    logged = json.loads(line)
    assert logged.pop("time").endswith("Z")
    assert logged == {
        "level": "info",
        "logger": "crust.x",
        "message": "deferred",
        "volume": "v\n1",
        "count": 2,
    }


def test_error_of_crust_is_logged_as_sentence_and_name() -> None:
    stream = io.StringIO()
    logs.configure(fmt="json", stream=stream)
    logging.getLogger("crust.x").info("failed", extra={"error": errors.NotReady("no", why="so")})
    logging.getLogger("crust.x").info("failed", extra={"error": OSError(2, "nothing")})
    ours, other = (json.loads(line) for line in stream.getvalue().splitlines())
    assert (ours["error"], ours["error_name"]) == ("no: so", "NotReady")
    assert other["error"] == "[Errno 2] nothing"
    assert "error_name" not in other


def test_a_traceback_stays_in_its_line() -> None:
    stream = io.StringIO()
    logs.configure(fmt="json", stream=stream)
    try:
        raise ValueError("broken")
    except ValueError:
        logging.getLogger("crust.x").exception("unexpected")
    (line,) = stream.getvalue().splitlines()
    assert "ValueError: broken" in json.loads(line)["traceback"]


def test_the_console_shows_fields_and_a_level_hides_what_is_below_it() -> None:
    stream = io.StringIO()
    logs.configure(level="warning", stream=stream)
    logging.getLogger("crust.x").info("hidden")
    logging.getLogger("crust.x").warning("shown", extra={"volume": "v"})
    assert stream.getvalue().rstrip().endswith("WARN shown  volume=v")


async def test_the_contexts_fields_are_on_each_line_and_stay_in_their_task() -> None:
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


def test_value_that_json_does_not_support_is_logged_as_text() -> None:
    stream = io.StringIO()
    logs.configure(fmt="json", stream=stream)
    logging.getLogger("crust.x").info("odd", extra={"value": {1}, "data": b"x"})
    assert json.loads(stream.getvalue())["data"] == "b'x'"


def test_value_with_newline_stays_on_one_console_line() -> None:
    stream = io.StringIO()
    logs.configure(stream=stream)
    logging.getLogger("crust.x").info("served", extra={"error": "no\n12:00:00 INFO all is well"})
    assert stream.getvalue().count("\n") == 1
