"""Each refusal with a real Kata, and what it leaves: no claim, no device in an entry, a pod that can start."""

import hashlib
import signal
from collections.abc import Callable

import pytest

from tests.real_kata.conftest import Daemon, KataNode

Volume = tuple[str, str]
Fault = Callable[[KataNode, str], None]

ENTRY = "/run/kata-containers/shared/direct-volumes/*"
DROP_IN = "[hypervisor.clh]\nrootless = true\n"
FOREIGN = (
    '{"volume-type":"directvol","device":"/dev/null","fstype":"ext4","metadata":{},"options":[]}'
)


def _configure(node: KataNode, target: str) -> None:
    node.drop_in.parent.mkdir(exist_ok=True)
    node.drop_in.write_text(DROP_IN)


def _configured(node: KataNode, target: str) -> None:
    node.drop_in.unlink()


def _take_name(node: KataNode, target: str) -> None:
    assert node.run("sh", "-c", f"echo '{FOREIGN}' > $(echo {ENTRY}/mountInfo.json)").is_ok


def _free_name(node: KataNode, target: str) -> None:
    assert node.run("sh", "-c", f"rm -r {ENTRY}").is_ok


def _hide_entry(node: KataNode, target: str) -> None:
    digest = hashlib.sha256(target.encode()).hexdigest()
    assert node.run("mv", f"/run/crust/volumes/{digest}", "/run/crust/aside").is_ok


def _show_entry(node: KataNode, target: str) -> None:
    digest = hashlib.sha256(target.encode()).hexdigest()
    assert node.run("mv", "/run/crust/aside", f"/run/crust/volumes/{digest}").is_ok
    node.wait(node.entries)


@pytest.mark.parametrize(
    ("error", "break_it", "mend_it"),
    [
        ("KataUnfit", _configure, _configured),
        ("KataEntryForeign", _take_name, _free_name),
        ("GuardWithoutEntry", _hide_entry, _show_entry),
    ],
)
def test_a_refusal_leaves_nothing_and_the_pod_starts_when_its_cause_is_gone(
    node: KataNode, volume: Volume, error: str, break_it: Fault, mend_it: Fault
) -> None:
    name, target = volume
    pod = node.pod(name)
    break_it(node, target)
    try:
        refused = node.container(pod, "app", target)
        assert f"[{error}]" in refused.text
    finally:
        mend_it(node, target)
    assert node.claim() == {}
    assert node.is_hidden()
    node.started(pod, "app", target, "echo x > /data/x && sleep 1000")
    assert node.claim()["sandbox_id"] == pod


def test_a_pod_that_forbids_block_devices_by_annotation_gets_no_directory_of_the_host(
    node: KataNode, volume: Volume
) -> None:
    """runtime-rs attaches a direct volume all the same."""
    name, target = volume
    key = "io.katacontainers.config.hypervisor.disable_block_device_use"
    answer = node.container(node.pod(name, annotations=f'{{"{key}": "true"}}'), "app", target)
    if node.is_rust:
        assert answer.is_ok, answer.text
        shown = node.cri("exec", answer.text.splitlines()[-1], "grep", "/data", "/proc/mounts")
        assert "ext4" in shown.text
    else:
        assert "[SandboxWithoutBlockDevices]" in answer.text
        assert node.claim() == {}


def test_a_group_reaches_the_files_or_is_refused(node: KataNode, volume: Volume) -> None:
    """A kubelet gives it to the target after the publish."""
    name, target = volume
    pod = node.pod(name)
    assert node.run("chgrp", "3000", target).is_ok
    answer = node.container(pod, "app", target)
    if node.is_rust:
        assert "[UnsupportedByHandler]" in answer.text
        assert node.claim() == {}
        return
    assert answer.is_ok, answer.text
    shown = node.cri("exec", answer.text.splitlines()[-1], "stat", "-c", "%g", "/data")
    assert shown.text == "3000"


def test_while_the_bridge_is_away_a_required_plugin_is_asked_for_and_others_start(
    node: KataNode, volume: Volume, bridge: Daemon
) -> None:
    """containerd's validator; without it Kata's own refusal, by the placeholder, is what is left."""
    name, target = volume
    asks = node.pod(name, annotations='{"required-plugins.noderesource.dev/pod": "[ crust ]"}')
    other = node.pod(f"{name}-2")
    bridge.end(signal.SIGKILL)
    node.container(other, "first", "")  # the engine notices the plugin's end by it
    refused = node.container(asks, "app", target)
    assert 'required plugin "crust" not present' in refused.text
    refused = node.container(other, "app", target)
    assert not refused.is_ok
    assert node.claim() == {}
    node.started(other, "beside", "")
    again = node.daemon("kata")
    try:
        node.started(asks, "app", target)
    finally:
        again.end(signal.SIGKILL)


def test_a_second_sandbox_of_the_same_pod_does_not_get_the_disk_of_an_orphan(
    node: KataNode, volume: Volume
) -> None:
    name, target = volume
    first = node.pod(name)
    app = node.started(first, "app", target, "echo first > /data/x; sync; sleep 1000")
    node.wait(lambda: node.cri("exec", app, "cat", "/data/x").text == "first")
    node.run("sh", "-c", f"kill -9 $(pgrep -f 'containerd-shim-kata.*{first}')")
    second = node.pod(name, attempt=1)
    refused = node.container(second, "again", target)
    assert "[HeldBySandbox]" in refused.text
    assert first in refused.text
    assert node.is_hidden()
    node.end_orphan(first, target)
    node.started(second, "once-more", target)
    assert node.claim()["sandbox_id"] == second


def test_after_a_reboot_the_publish_is_replayed_and_the_data_is_there(
    node: KataNode, volume: Volume, bridge: Daemon
) -> None:
    """Everything of /run goes, with the machines and crust's daemons; the kubelet stages and publishes again."""
    name, target = volume
    pod = node.pod(name)
    app = node.started(pod, "app", target, "echo kept > /data/x; sync; sleep 1000")
    node.wait(lambda: node.cri("exec", app, "cat", "/data/x").text == "kept")
    bridge.end(signal.SIGKILL)
    node.crust.end(signal.SIGKILL)
    node.run("sh", "-c", f"kill -9 $(pgrep -f '{pod}')")  # shim, machine, keeper
    node.wait(lambda: not node.run("pgrep", "-f", pod).is_ok)
    node.run(
        "sh", "-c", f"umount {target}; rm -rf /run/crust /run/crust-csi.sock /run/crust-vendor.sock"
    )
    node.run("sh", "-c", "rm -rf /run/kata-containers/shared/direct-volumes; mkdir /run/crust")
    node.crust = node.daemon("node")
    again = node.daemon("kata")
    try:
        answer = node.co("up", name)
        assert answer.is_ok, answer.text
        node.wait(node.entries)
        app = node.started(node.pod(name, attempt=1), "again", target)
        assert node.cri("exec", app, "cat", "/data/x").text == "kept"
        for box in node.sandboxes():
            node.cri("stopp", box)
            node.cri("rmp", box)
        node.wait(lambda: node.co("unpublish", name).is_ok)
    finally:
        again.end()
