"""The secrets of a request in an error that repeats them are hidden in each form that a library may give them."""

import base64
import json
import time
import urllib.parse

import pytest

from crust.core import credentials
from crust.rpc.messages import redaction
from crust.wire.csi.v1 import csi_pb2

PASSPHRASE = 'pl"us\\back zq+/=<ÄEND\nLINE2zqé'
KEY = "AQBzqCephKeyzq1234567890abcdefgh=="


def encoded(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


def hidden_in(text: str, **secrets: str) -> str:
    request = csi_pb2.NodeStageVolumeRequest(
        volume_id="v", secrets=secrets or {"passphrase": PASSPHRASE, "userKey": KEY}
    )
    return redaction.without_secrets(text, request)


# What Go's fmt makes of it with %q and %#v, and encoding/json, by the rules of strconv.Quote and json.Marshal.
GO_QUOTED = r'"pl\"us\\back zq+/=<ÄEND\nLINE2zqé"'
GO_JSON = r'"pl\"us\\back zq+/=\u003cÄEND\nLINE2zqé"'


@pytest.mark.parametrize(
    "form",
    [
        PASSPHRASE,
        f" {PASSPHRASE.strip()} ",
        json.dumps(PASSPHRASE),
        json.dumps(PASSPHRASE, ensure_ascii=False),
        json.dumps(json.dumps(PASSPHRASE)),
        repr(PASSPHRASE),
        repr(PASSPHRASE.encode()),
        GO_QUOTED,
        GO_JSON,
        urllib.parse.quote(PASSPHRASE),
        urllib.parse.quote(PASSPHRASE, safe=""),
        urllib.parse.quote_plus(PASSPHRASE),
        encoded(PASSPHRASE),
        encoded(PASSPHRASE)[:-7],
        base64.urlsafe_b64encode(PASSPHRASE.encode()).decode(),
        encoded(f"a:{PASSPHRASE}"),  # HTTP's Basic, where the user's name moves the alignment
        encoded(f"ab:{PASSPHRASE}"),
        encoded(f"abc:{PASSPHRASE}"),
        PASSPHRASE.splitlines()[0],
        PASSPHRASE.splitlines()[1],
        PASSPHRASE[:12],
        PASSPHRASE[9:],
        KEY[:20],
        f"{KEY[:16]}\n{KEY[16:]}",
        encoded(KEY),
    ],
    ids=range(25),
)
def test_secret_is_hidden_in_each_form_and_cut(form: str) -> None:
    shown = hidden_in(f"the volume cannot be opened with {form} : bad")
    rest = shown.removeprefix("the volume cannot be opened with").removesuffix(": bad")
    assert credentials.HIDDEN in rest
    assert not any(form[at : at + 8] in rest for at in range(len(form) - 7)), rest
    assert "zq" not in rest


def test_words_around_a_secret_and_users_name_are_left() -> None:
    text = f"rbd: image pvc-1 of client.admin: key {KEY}: Permission denied (13)"
    assert hidden_in(text, userKey=KEY, userID="admin") == text.replace(KEY, "***")


def test_short_secret_is_hidden_as_a_whole_alone() -> None:
    assert hidden_in("pin 1234 or 123 of 12345", pin="1234") == "pin *** or 123 of ***5"
    assert hidden_in("the key is not a keyring", pin="key") == "the *** is not a keyring"


def test_secrets_of_a_large_request_are_searched_in_bounded_time() -> None:
    """A message has megabytes, and CSI's secrets 4 KiB: more of them is refused before a driver sees it."""

    def seconds(size: int) -> float:
        request = csi_pb2.NodeStageVolumeRequest(secrets={"a": "xy" * (size // 2)})
        began_s = time.thread_time()
        redaction.without_secrets("xyxyxyxz" * 1024, request)
        return time.thread_time() - began_s

    assert any(seconds(4 << 20) < 4 * seconds(64 << 10) for _ in range(3))
