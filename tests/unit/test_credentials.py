"""What looks like a credential in another program's text is hidden; what does not stays readable."""

import asyncio
import io
import logging
from collections.abc import Iterator

import pytest

from crust import credentials, logs
from crust.proxy.deferrals.events import Event, Events

SECRET = "s3same-0pen"


@pytest.mark.parametrize(
    "text",
    [
        f"mount failed: exit status 32, arguments -t cifs -o user=joe,password={SECRET},vers=3 //a/b",
        f"mount -o username=joe,PASSWD='{SECRET} and more' failed",
        f'body {{"user":"joe","password":"{SECRET}"}} was refused',
        f'{{"userID":"joe","userKey":"{SECRET}"}}',
        f'{{"secretAccessKey": "a\\"{SECRET}"}}',
        f"secrets {{'userKey': '{SECRET}'}}",
        f'{{"message": "driver got {{\\"password\\": \\"{SECRET}\\"}}"}}',
        f'{{"message": "driver got {{\\"userKey\\": \\"{SECRET}\\"}}"}}',
        f"request map[adminKey:x secretRef: password:{SECRET} user:joe]",
        f"rbd map --id joe --keyring-token {SECRET} failed",
        f"secret = {SECRET}",
        f"GET https://joe:{SECRET}@store.example/api failed",
        f"header Authorization: Bearer {SECRET}.x was refused",
        f"token eyJhbGciOiJSUzI1NiJ9.{SECRET}.sig is expired",
    ],
)
def test_hidden_removes_what_looks_like_a_credential(text: str) -> None:
    assert SECRET not in credentials.hidden(text)
    assert credentials.HIDDEN in credentials.hidden(text)


@pytest.mark.parametrize(
    "text",
    [
        "mount: /dev/loop0 on /a: wrong fs type, bad option, bad superblock",
        "KeyError: 'vol-1'",
        "it took 3 passes; the monkey keeps its keys",
        '{"keys": 3, "volume_id": "monkey", "passed": true}',
        "cannot read /run/crust/volumes/ab12/mountInfo.json: Permission denied",
        "https://docs.example/mount was not found",
    ],
)
def test_hidden_leaves_other_text(text: str) -> None:
    assert credentials.hidden(text) == text


def test_hidden_takes_no_longer_for_hostile_text() -> None:
    """Linear: a pattern that tries again at each character would not end here."""
    for part in (
        "key",
        '"key',
        '"key":"\\',
        '\\"key\\":\\"',
        "'key",
        "-token",
        "pass=",
        'secret "',
        "://",
        "eyJ",
    ):
        assert len(credentials.hidden(part * 20_000)) > 0


@pytest.fixture
def stream() -> Iterator[io.StringIO]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield io.StringIO()
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.mark.parametrize("fmt", ["json", "console"])
def test_log_line_hides_credentials_in_fields_messages_and_tracebacks(
    fmt: logs.Format, stream: io.StringIO
) -> None:
    logs.configure(fmt=fmt, stream=stream)
    logger = logging.getLogger("crust.x")
    text = f"-o password={SECRET}"
    logger.info("served", extra={"error": text, "cause": OSError(text)})
    logger.info("option %s", text)
    try:
        raise ValueError(text)
    except ValueError:
        logger.exception("unexpected error")
    assert stream.getvalue().count("password=***") >= 4
    assert SECRET not in stream.getvalue()


async def test_event_hides_credentials() -> None:
    events = Events()
    async with events.watch() as watched:
        events.emit(Event("refused", message=f"-o password={SECRET}"))
        stopping = asyncio.Event()
        async for event in watched(stopping):
            assert event.message == "-o password=***"
            break
