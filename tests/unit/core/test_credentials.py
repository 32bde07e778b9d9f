"""Credentials: hidden in another program's text, and refused among the mount options for a guest."""

import io
import logging
import time
from typing import get_args

import pytest

from crust.blockdriver import serve
from crust.blockdriver.settings import LOCAL_ENGINES, DriverSettings
from crust.core import credentials, deferral_keys, errors, logs, volumes
from crust.host.filesystems import mkfs, superblocks
from crust.host.mounts import mount_options
from crust.proxy.table import Event, Events
from examples.kata.guest import kernel
from examples.kata.guest.agent import format as guest_format
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


async def test_event_is_one_printable_line() -> None:
    events = Events()
    async with events.watch() as watched:
        events.emit(Event("claimed", message="sandbox a\x1b[2J\nready kata\x9b\u202e"))
        assert (await anext(watched)).message == r"sandbox a\x1b[2J\nready kata\x9b\u202e"


def test_last_of_ro_and_rw_wins() -> None:
    assert mount_options.parse(["ro", "rw"], for_guest=False).readonly is False
    assert mount_options.parse(["rw,ro"], for_guest=False).readonly is True


def test_quoted_label_with_commas_is_one_option_of_the_host() -> None:
    flag = 'context="system_u:object_r:container_file_t:s0:c1,c2",noatime'
    assert mount_options.parse([flag], for_guest=False).options == (
        flag.rpartition(",")[0],
        "noatime",
    )
    assert mount_options.parse([flag], for_guest=True).options == ("noatime",)


@pytest.mark.parametrize("word", ["bind", "remount,ro", "move", "rbind"])
def test_options_that_change_other_mounts_are_refused(word: str) -> None:
    with raised("MountOptionNotAllowed"):
        mount_options.parse([word], for_guest=False)


# The keys of a volume context that say how a volume is deferred.


@pytest.mark.parametrize("value", ["", "Always", "yes", "runtimeclass", "a" * 500])
def test_other_value_of_defer_is_refused_with_the_allowed_ones(value: str) -> None:
    with pytest.raises(
        deferral_keys.InvalidDeferKey, match="always, never, runtime-class"
    ) as caught:
        deferral_keys.defer({"crust.dev/defer": value})
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    ("context", "expected"),
    [
        ({}, True),
        ({"crust.dev/defer": "never"}, False),
        ({"crust.dev/defer": "never", "vendor": "x"}, False),
        ({"crust.dev/defer": "always"}, True),
        ({"crust.dev/defer": "runtime-class"}, True),
        ({"crust.dev/defer": "Never"}, True),
        ({"crust.dev/defer": "never", "crust.dev/encryption": "luks"}, True),
        ({"crust.dev/defer": "never", "crust.dev/format-in": "guest"}, True),
    ],
)
def test_volume_may_be_deferred_unless_its_context_excludes_it(
    context: dict[str, str], *, expected: bool
) -> None:
    assert deferral_keys.may_defer(context) is expected


def test_volume_is_formatted_only_if_it_was_created_empty() -> None:
    options = {"crust.dev/ext4-bytes-per-inode": "16384", "crust.dev/ext4-reserved-percent": "0"}
    assert deferral_keys.guest_format(options) is None
    assert deferral_keys.guest_format({"crust.dev/created-empty": "false", **options}) is None
    made = deferral_keys.guest_format({"crust.dev/created-empty": "true", **options})
    assert made == volumes.GuestFormat(16384, 0)
    assert deferral_keys.guest_format({"crust.dev/created-empty": "true"}) == volumes.GuestFormat()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("crust.dev/created-empty", "True"),
        ("crust.dev/ext4-bytes-per-inode", "1" * 5000),
        ("crust.dev/ext4-bytes-per-inode", "12"),
        ("crust.dev/ext4-bytes-per-inode", "0x4000"),
        ("crust.dev/ext4-reserved-percent", "51"),
        ("crust.dev/ext4-reserved-percent", "-1"),
    ],
)
def test_invalid_format_option_is_refused(key: str, value: str) -> None:
    with pytest.raises(errors.InvalidRequest):
        deferral_keys.guest_format({"crust.dev/created-empty": "true", key: value})


def test_encryption_is_luks_or_nothing_formatted_by_guests_alone() -> None:
    assert deferral_keys.encryption({}) is None
    assert not deferral_keys.formats_in_guest({})
    luks = {"crust.dev/encryption": "luks"}
    assert deferral_keys.encryption(luks) is volumes.Encryption.LUKS
    assert deferral_keys.formats_in_guest(luks)
    guest = {"crust.dev/format-in": "guest"}
    assert deferral_keys.formats_in_guest(guest)
    contexts: tuple[dict[str, str], ...] = ({}, guest, luks)
    values = [deferral_keys.format_in(context) for context in contexts]
    assert values == ["host", "guest", "luks"]
    assert [deferral_keys.of_format_in(value) for value in values] == [*contexts]
    assert deferral_keys.format_in(guest | luks) == "luks"


@pytest.mark.parametrize(
    ("context", "allowed"),
    [
        ({"crust.dev/encryption": "LUKS"}, "it must be luks"),
        ({"crust.dev/encryption": ""}, "it must be luks"),
        ({"crust.dev/format-in": "host"}, "it must be guest"),
        ({"crust.dev/encryption": "luks", "crust.dev/defer": "never"}, "always or runtime-class"),
        ({"crust.dev/format-in": "guest", "crust.dev/defer": "never"}, "always or runtime-class"),
    ],
)
def test_context_that_contradicts_itself_is_refused(context: dict[str, str], allowed: str) -> None:
    with pytest.raises(deferral_keys.InvalidDeferKey, match=allowed):
        deferral_keys.formats_in_guest(context)


def test_passphrase_is_the_first_that_is_given() -> None:
    of_stage, of_publish = {"passphrase": "old"}, {"passphrase": "new", "other": "x"}
    assert deferral_keys.passphrase("vol-1", of_publish, of_stage) == "new"
    assert deferral_keys.passphrase("vol-1", {"passphrase": ""}, of_stage) == "old"
    with raised("PassphraseMissing", match="node-publish-secret-name"):
        deferral_keys.passphrase("vol-1", {}, {"other": "x"})


def test_encrypted_volume_is_not_published_on_host_even_raw() -> None:
    luks, guest = {"crust.dev/encryption": "luks"}, {"crust.dev/format-in": "guest"}
    for is_block in (False, True):
        with raised("EncryptedOnHost"):
            deferral_keys.check_host_publish("vol-1", luks, is_block=is_block)
    with raised("FilesystemOfGuest"):
        deferral_keys.check_host_publish("vol-1", guest, is_block=False)
    deferral_keys.check_host_publish("vol-1", guest, is_block=True)


# Errors say what failed, why, and what to do.


def test_message_has_what_why_and_hint() -> None:
    assert str(errors.NotReady("a", why="b", hint="c")) == "a: b; c"
    assert str(errors.NotReady("a", why="b")) == "a: b"
    assert str(errors.NotReady("a", hint="c")) == "a; c"
    assert str(errors.NotReady("a")) == "a"


def test_every_branch_says_what_to_do() -> None:
    for branch in errors.CrustError.__subclasses__():
        if branch.__module__ == "crust.core.errors":
            assert "advice" in vars(branch)


# Each list of filesystems and of engines has every filesystem and every engine: a new one is missing nowhere.


def test_every_engine_that_can_be_set_is_made() -> None:
    engines = get_args(DriverSettings.model_fields["engine"].annotation)
    assert serve._ENGINES.keys() == set(engines)
    assert set(engines) > LOCAL_ENGINES


def test_every_filesystem_is_made_read_mounted_and_known_to_guest() -> None:
    known = set(mkfs.SUPPORTED)
    assert mkfs._TABLE.keys() == known
    assert superblocks._READERS.keys() == superblocks._BLOCK_SIZES.keys() == known
    assert mount_options._ALLOWED.keys() >= known
    assert guest_format._MKFS.keys() == known
    assert kernel.FILESYSTEM_MODULES.keys() >= known
