"""A token that the driver refuses: its own code and words arrive, nothing stays, and the token is nowhere."""

import logging
import os
from dataclasses import replace
from pathlib import Path

import grpc
import pytest

from crust.core import logs
from tests.integration.wrap.conftest import Wrapped
from tests.support.faults.refusals import refused

pytestmark = pytest.mark.root
Code = grpc.StatusCode
WRONG = "a-token-of-somebody-else"
TOKENS = "csi.storage.k8s.io/serviceAccount.tokens"


def files_with(node: Wrapped, text: str) -> list[Path]:
    """Files of crust and of the kubelet; the driver's log of requests is its own."""
    return [
        path
        for place in (node.places.kubelet, node.places.run, node.places.volumes)
        for path in Path(place).rglob("*")
        if path.is_file() and text.encode() in path.read_bytes()
    ]


def logged(caplog: pytest.LogCaptureFixture) -> str:
    """Every line, with its facts, formatted as the daemons do."""
    return "\n".join(logs.JsonFormatter().format(each) for each in caplog.records)


async def test_stage_secret_that_the_driver_refuses(
    cloud: Wrapped, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    volume, target = await cloud.volume(), cloud.target("one")
    for _ in range(2):  # a kubelet retries
        said = await refused(
            cloud.stage(volume, {"token": WRONG}),
            Code.INVALID_ARGUMENT,
            "node stage secret with a valid token is required",
        )
        assert WRONG not in said
    assert not os.path.lexists(cloud.paths(volume).staging)
    await cloud.stage(volume)
    await cloud.publish(volume, target)
    assert files_with(cloud, WRONG) == []
    assert WRONG not in logged(caplog)


async def test_pod_token_that_the_driver_refuses(
    cloud: Wrapped, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    cloud.driver.misbehave(**{"pod tokens": "needed"})
    volume, target = await cloud.staged_volume()
    wrong = replace(volume, context={**volume.context, TOKENS: WRONG})
    for _ in range(2):
        said = await refused(
            cloud.publish(wrong, target),
            Code.UNAUTHENTICATED,
            "the token of the pod is not accepted",
        )
        assert WRONG not in said
    assert cloud.places.entries() == []
    assert not os.path.lexists(target)
    right = replace(volume, context={**volume.context, TOKENS: "correct-token"})
    await cloud.publish(right, target)
    assert len(cloud.places.entries()) == 1
    for secret in (WRONG, "correct-token"):
        assert files_with(cloud, secret) == []
        assert secret not in logged(caplog)
