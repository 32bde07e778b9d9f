"""Credentials are hidden in another program's text, in logs and in events."""

import io
import logging
import time

import pytest

from crust.core import credentials, logs
from crust.proxy.table import Event, Events

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
        # lines of a kubelet, of drivers and of runtimes
        f'E0102 03:04:05.678901 1 utils.go:267] GRPC error: luksOpen failed for passphrase "{SECRET}"',
        f"cryptsetup: No key available with passphrase '{SECRET}'",
        f"cryptsetup: the passphrase is {SECRET}",
        f"I0102 1 rbd_util.go:352] rbd: map mon 10.0.0.1:6789 key AQD{SECRET.replace('-', '')}xxxxxxxxxxxx==",
        f'level=debug msg="GET /v2/" header="map[Authorization:[Basic {SECRET}] Accept:[*/*]]"',
        f"> Authorization: Basic {SECRET}",
        f"> Proxy-Authorization: Negotiate {SECRET}",
        f"> authorization: {SECRET}",
        f'{{"headers":{{"Authorization":["Bearer {SECRET}"]}}}}',
        f"mount.cifs kernel mount options: ip=10.0.0.2,unc=//a/b,user=joe,pwd={SECRET}",
        f"wpa: psk={SECRET}",
        f"env: AWS_ACCESS_KEY_ID AKIAX AWS_SECRET_ACCESS_KEY {SECRET}",
        f'exporting AWS_SECRET_ACCESS_KEY "{SECRET}"',
        f"iscsiadm: node.session.auth.password = {SECRET}",
        f"nvme connect: key DHHC-1:00:{SECRET}: was refused by the controller",
        f"nvme: psk NVMeTLSkey-1:01:{SECRET}: is not in the keyring",
        f"vault answered 403 to hvs.{SECRET}xxxxxxxx",
        f"-----BEGIN PRIVATE KEY-----\\n{SECRET}\\n-----END PRIVATE KEY-----",
        f"key of the monitor: -----BEGIN OPENSSH PRIVATE KEY-----\n{SECRET}\n",
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
        'MountVolume.SetUp failed for volume "pvc-1" : secret "rook-csi" not found',
        "cryptsetup: No key available with this passphrase.",
        "the passphrase is missing: it has no key 'passphrase'",
        "mount error(126): Required key not available (ENOKEY)",
        "authorization failed for user system:node:a",
        "rbd: AQMP is not in the pool, IMAGE_META is",
        "-----BEGIN CERTIFICATE-----",
    ],
)
def test_hidden_leaves_other_text(text: str) -> None:
    assert credentials.hidden(text) == text


HOSTILE = (
    "-key", "--key-", "key", '"key', "'key'", "pass_", "a://b", 'key="\\', "key='", 'token:"', "-token-", "-eyJ",
    '"key":"\\', '\\"key\\":\\"', "pass=", 'secret "', "://", "bearer ", "key= ", '{"key":', "key.", "api-key:",
    "--token ", "eyJ.",
    "authorization: ", "Authorization:[", "passphrase is ", "password '", "A_KEY ", "_KEY", "AQ", "AQ+/",
    "DHHC-1:00:", "hvs.", "-----BEGIN PRIVATE KEY-----", "-----BEGIN ",
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


def test_private_key_over_lines_of_a_log_is_hidden() -> None:
    lines = [
        "Jan 02 node crust[1]: before",
        "Jan 02 node crust[1]: tls: -----BEGIN RSA PRIVATE KEY-----",
        *(f"Jan 02 node crust[1]: {SECRET}{number}" for number in range(30)),
        "Jan 02 node crust[1]: -----END RSA PRIVATE KEY-----",
        "Jan 02 node crust[1]: password=x after",
    ]
    hidden = credentials.hidden_lines("\n".join(lines))
    assert hidden.split("\n") == [
        lines[0],
        "Jan 02 node crust[1]: tls: ***",
        "Jan 02 node crust[1]: password=*** after",
    ]


def test_private_key_without_its_end_hides_a_bounded_rest() -> None:
    text = f"-----BEGIN PRIVATE KEY-----\n{SECRET}\n" + "x\n" * 20000 + "after"
    hidden = credentials.hidden_lines(text)
    assert SECRET not in hidden
    assert hidden.endswith("after")


def test_private_key_without_its_begin_is_hidden() -> None:
    hidden = credentials.hidden_lines(f"{SECRET}\n-----END PRIVATE KEY-----\nafter")
    assert hidden == "***\nafter"


def test_shown_text_is_cut_without_splitting_a_credential() -> None:
    text = "x" * (credentials.SHOWN_MAX_CHARS - 20) + f" token eyJhbGciOiJSUzI1NiJ9.{SECRET}.sig"
    shown = credentials.shown(text * 3)
    assert len(shown) <= credentials.SHOWN_MAX_CHARS
    assert "eyJ" not in shown
    assert credentials.shown("short") == "short"


def test_value_in_a_quote_that_is_not_closed_is_hidden() -> None:
    assert SECRET not in credentials.hidden(f'mount failed: password="a {SECRET}')


@pytest.mark.parametrize("fmt", ["json", "console"])
@pytest.mark.usefixtures("logging_restored")
def test_log_line_hides_credentials_everywhere(fmt: logs.Format) -> None:
    stream = io.StringIO()
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
        assert (await anext(watched)).message == "-o password=***"
