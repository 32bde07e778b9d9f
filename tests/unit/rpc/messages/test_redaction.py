"""Secrets are hidden: in the description of a message, in logs, and in an error that repeats them in any form."""

import base64
import io
import json
import time
import urllib.parse
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from crust.core import credentials, logs
from crust.rpc.messages import redaction
from crust.wire.csi.v1 import csi_pb2
from tests.support.co import capability as capability_of
from tests.support.drivers.fake_driver import Failure
from tests.support.nodes.fake_node import FakeNode
from tests.support.nodes.places import Places

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


SECRET = "s3same-0pen"


@pytest.mark.parametrize(
    ("message", "described"),
    [
        (
            csi_pb2.NodePublishVolumeRequest(volume_id="v", secrets={"user": SECRET}),
            {"volume_id": "v", "secrets": "***"},
        ),
        (
            csi_pb2.CreateVolumeRequest(
                volume_capabilities=[capability_of(mount_flags=[f"password={SECRET}"])]
            ),
            {
                "volume_capabilities": [
                    {
                        "mount": {"fs_type": "ext4", "mount_flags": "***"},
                        "access_mode": {"mode": capability_of().access_mode.mode},
                    }
                ]
            },
        ),
        *(
            (
                csi_pb2.NodePublishVolumeRequest(volume_context={key: SECRET, "pool": "a"}),
                {"volume_context": {key: "***", "pool": "a"}},
            )
            for key in (
                "csi.storage.k8s.io/serviceAccount.tokens",
                "adminPassword",
                "SECRET_ref",
                "apiKey",
                "credentials",
            )
        ),
        (
            csi_pb2.NodeGetInfoResponse(node_id="n", supported_file_systems=["ext4", "xfs"]),
            {"node_id": "n", "supported_file_systems": ["ext4", "xfs"]},
        ),
    ],
)
def test_description_of_a_message_hides_its_secrets_alone(
    message: Any, described: dict[str, Any]
) -> None:
    assert redaction.describe(message) == described


def test_every_field_that_csi_marks_in_every_message_is_replaced() -> None:
    marked = 0
    for message in csi_pb2.DESCRIPTOR.message_types_by_name.values():
        for field in message.fields:
            if redaction.is_marked(field):
                marked += 1
                built = getattr(csi_pb2, message.name)(**{field.name: {"k": SECRET}})
                assert SECRET not in str(redaction.describe(built))
    assert marked >= 10


@pytest.fixture
def everything_logged(logging_restored: None) -> io.StringIO:
    stream = io.StringIO()
    logs.configure(level="debug", fmt="json", stream=stream)
    return stream


async def test_planted_secret_is_in_no_log_file_or_error(
    everything_logged: io.StringIO, short: str
) -> None:
    """The whole life of a volume with secrets in every field that can hold one, logged at level debug."""
    places = Places.make(short)
    context = {"csi.storage.k8s.io/serviceAccount.tokens": SECRET, "pool": "a"}
    async with FakeNode(places) as node, node.handler():
        target = places.target("one")
        fields: dict[str, Any] = {"secrets": {"key": SECRET}, "volume_context": context}
        await node.co.publish("vol-1", target, **fields)
        await node.co.publish("vol-1", target, **fields)
        flags = [f"password={SECRET}"]
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await node.co.publish(
                "vol-2", places.target("two"), capability_of(mount_flags=flags), **fields
            )
        assert SECRET not in str(refused.value)
        assert _files_with(SECRET, short) == []
        with node.sandbox(target):
            await node.co.stats("vol-1", target)
        await node.co.unpublish("vol-1", target)
    text = everything_logged.getvalue()
    assert "NodePublishVolume" in text
    assert "deferred" in [json.loads(line)["message"] for line in text.splitlines()]
    assert SECRET not in text


async def test_secret_in_drivers_error_reaches_caller_and_no_log(
    everything_logged: io.StringIO, short: str
) -> None:
    """In a call that passes as bytes, in a deferred one, and in one whose code the proxy changes."""
    places = Places.make(short)
    secrets = {"key": SECRET, "pin": "q7x"}
    failure = Failure(grpc.StatusCode.INTERNAL, f"login {SECRET} with q7x failed")
    async with FakeNode(places) as node, node.handler():
        for defer in (False, True):
            node.driver.failures["NodePublishVolume"] = failure
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await node.co.publish("vol-1", places.target("one"), defer=defer, secrets=secrets)
            assert refused.value.details() == f"login {SECRET} with q7x failed"
        stage = csi_pb2.NodeStageVolumeRequest(volume_id="vol-1", secrets=secrets)
        node.driver.failures["NodeStageVolume"] = failure
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await node.co.node.NodeStageVolume(stage, timeout=10)
        assert SECRET in str(refused.value.details())
    text = everything_logged.getvalue()
    assert "login *** with *** failed" in text
    assert SECRET not in text
    assert "q7x" not in text


@pytest.mark.parametrize("key", ["userID", "adminID", "node.session.auth.username"])
def test_user_name_beside_secret_is_not_hidden_in_error(key: str) -> None:
    secrets = {key: "admin", "userKey": SECRET}
    request = csi_pb2.NodeStageVolumeRequest(volume_id="v", secrets=secrets)
    text = f"client.admin cannot log in with {SECRET}: ask an administrator for its caps"
    shown = redaction.without_secrets(text, request)
    assert shown == text.replace(SECRET, "***")
    assert redaction.describe(request)["secrets"] == "***"


@pytest.mark.parametrize("key", ["userKey", "secretID", "user.password", "pin"])
def test_secret_that_is_common_word_is_hidden_in_error(key: str) -> None:
    request = csi_pb2.NodeStageVolumeRequest(volume_id="v", secrets={key: "admin"})
    shown = redaction.without_secrets("no admin", request)
    assert shown == "no ***"


def _files_with(secret: str, root: str) -> list[str]:
    return [
        str(path)
        for path in Path(root).rglob("*")
        if path.is_file() and secret.encode() in path.read_bytes()
    ]
