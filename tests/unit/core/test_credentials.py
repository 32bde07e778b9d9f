"""Credentials: hidden in another program's text, and refused among the mount options for a guest."""

import asyncio
import io
import logging
import time
from collections.abc import Iterator

import pytest

from crust.core import credentials, logs, mount_options
from crust.proxy.events import Event, Events
from tests.support.raised import raised

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


HOSTILE = (
    "-key", "--key-", "key", '"key', "'key'", "pass_", "a://b", 'key="\\', "key='", 'token:"', "-token-", "-eyJ",
    '"key":"\\', '\\"key\\":\\"', "pass=", 'secret "', "://", "bearer ", "key= ", '{"key":', "key.", "api-key:",
    "--token ", "eyJ.",
)  # fmt: skip


def seconds(text: str) -> float:
    """What this thread takes for it, whatever else the machine does."""
    began_s = time.thread_time()
    credentials.hidden(text)
    return time.thread_time() - began_s


@pytest.mark.parametrize("unit", HOSTILE)
def test_hidden_takes_time_in_proportion_to_the_text(unit: str) -> None:
    """Sixteen times the text. A pattern that tries again at each character would take 256 times as long."""
    short, long = (unit * (size // len(unit)) for size in (1 << 16, 1 << 20))
    assert any(seconds(long) < 64 * seconds(short) for _ in range(3))


def test_shown_is_cut_and_shows_no_credential_that_the_cut_would_split() -> None:
    text = "x" * (credentials.SHOWN_MAX_CHARS - 20) + f" token eyJhbGciOiJSUzI1NiJ9.{SECRET}.sig"
    shown = credentials.shown(text * 3)
    assert len(shown) <= credentials.SHOWN_MAX_CHARS
    assert "eyJ" not in shown
    assert credentials.shown("short") == "short"


def test_value_in_a_quote_that_is_not_closed_is_hidden() -> None:
    assert SECRET not in credentials.hidden(f'mount failed: password="a {SECRET}')


@pytest.fixture
def stream() -> Iterator[io.StringIO]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield io.StringIO()
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.mark.parametrize("fmt", ["json", "console"])
def test_log_line_hides_credentials_everywhere(fmt: logs.Format, stream: io.StringIO) -> None:
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


def test_host_only_options_do_not_reach_the_guest_and_ro_becomes_a_field() -> None:
    options = mount_options.for_guest(["noatime,_netdev", "ro", "x-systemd.automount", "rshared"])
    assert options == mount_options.MountOptions(("noatime",), readonly=True)


def test_the_last_of_ro_and_rw_wins() -> None:
    assert mount_options.for_host(["ro", "rw"]).readonly is False
    assert mount_options.for_host(["rw,ro"]).readonly is True


def test_quoted_label_with_commas_is_one_option_and_stays_on_the_host() -> None:
    flag = 'context="system_u:object_r:container_file_t:s0:c1,c2",noatime'
    assert mount_options.for_host([flag]).options == (flag.rpartition(",")[0], "noatime")
    assert mount_options.for_guest([flag]).options == ("noatime",)


@pytest.mark.parametrize(
    "word", ["password=x1y2", "secret", "keyfile=/x1y2", "src=https://u:x1y2@h/"]
)
def test_a_credential_is_refused_and_its_value_is_not_in_the_error(word: str) -> None:
    with raised("CredentialInOptions") as caught:
        mount_options.for_guest(["noatime", word])
    assert "x1y2" not in str(caught.value)


@pytest.mark.parametrize("word", ["bind", "remount,ro", "move", "rbind"])
def test_options_that_change_other_mounts_are_refused(word: str) -> None:
    with raised("MountOptionNotAllowed"):
        mount_options.for_host([word])
