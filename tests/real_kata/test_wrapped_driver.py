"""A driver that knows nothing of crust, behind a shim: the proxy makes the filesystem, and a real Kata mounts it."""

from collections.abc import Iterator

import pytest

from tests.real_kata.conftest import Daemon, KataNode

_INNER, _SHIM = "/run/crust-inner.sock", "/run/crust/wrapped/csi.sock"


@pytest.fixture
def wrapped(node: KataNode, bridge: Daemon) -> Iterator[None]:
    """The driver and its shim."""
    arguments = ("--socket", _INNER, "--state-dir", "/var/lib/crust/minimal", "--node-id", "node")
    driver = node.program("driver", "examples.drivers.minimal", *arguments)
    shim = node.program("shim", "crust", "shim", "--socket", _SHIM, "--driver-socket", _INNER)
    node.wait(lambda: node.run("test", "-S", _SHIM).is_ok)
    yield
    shim.end()
    driver.end()


@pytest.mark.usefixtures("wrapped")
def test_a_new_volume_of_another_s_driver_is_formatted_once_and_keeps_its_data(
    node: KataNode,
) -> None:
    name = "wrapped"
    target = f"/var/lib/kubelet/pods/{name}/volumes/kubernetes.io~csi/pvc/mount"
    for at, expected in ((1, ""), (2, "from the first pod")):
        node.wait(lambda: "UNAVAILABLE" not in node.co("up", name, "wrapped").text)
        answer = node.co("up", name, "wrapped")
        assert answer.is_ok, answer.text
        node.wait(node.entries)
        pod = node.pod(f"{name}-{at}")
        app = node.started(pod, "app", target)
        assert expected in node.cri("exec", app, "sh", "-c", "cat /data/x || true").text
        script = "grep /data /proc/mounts; echo from the first pod > /data/x; sync"
        assert "ext4" in node.cri("exec", app, "sh", "-c", script).text
        node.cri("stopp", pod)
        node.cri("rmp", pod)
        node.wait(lambda: node.co("unpublish", name, "wrapped").is_ok)
    node.wait(lambda: node.co("down", name, "wrapped").is_ok)
