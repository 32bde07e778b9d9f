"""Each refusal with a real Kata, and what it leaves: no claim, no device in an entry, a pod that can start."""

import contextlib
import hashlib
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.real_kata.conftest import Daemon, KataNode, Volume

Fault = Callable[[KataNode, str], None]

ENTRY = "/run/kata-containers/shared/direct-volumes/*"
OTHER = {
    False: "[hypervisor.clh]\n[runtime]\nname = 'virt_container'\n",
    True: "[hypervisor.qemu]\ndisable_block_device_use = false\n",
}
"""A configuration of Kata's other runtime, by whether the tested one is runtime-rs."""
RUST_SAYS = "containerd-shim-kata-v2 shim (Rust): id: io.containerd.kata.v2, version: 4.1.0"
FOREIGN = (
    '{"volume-type":"directvol","device":"/dev/null","fstype":"ext4","metadata":{},"options":[]}'
)


def _check_nothing_stays(node: KataNode) -> None:
    """A call whose time was over undoes what it did a moment later."""
    node.wait(lambda: node.claim() == {})
    assert node.is_hidden()
    assert "/dev/loop" not in node.open_in_machines()


def _configure(node: KataNode, target: str) -> None:
    node.drop_in.parent.mkdir(exist_ok=True)
    node.drop_in.write_text(f"[hypervisor.{node.hypervisor}]\nrootless = true\n")


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


def _hang_configuration(node: KataNode, target: str) -> None:
    """The bridge reads a file that has changed before each create: this one does not answer."""
    node.drop_in.parent.mkdir(exist_ok=True)
    os.mkfifo(node.drop_in)


def _let_go(node: KataNode, target: str) -> None:
    """The late thread goes on, claims, and undoes it: before the next container of the volume has its turn."""
    os.close(os.open(node.drop_in, os.O_WRONLY | os.O_NONBLOCK))
    node.drop_in.unlink()


def _evidence(node: KataNode) -> str:
    """What names a sandbox's machine; of QEMU with runtime-rs nothing does, but its runtime has a directory of it."""
    if node.is_rust:
        return "/run/kata/*" if node.hypervisor == "qemu" else "/run/kata/*/ch-api.sock"
    return "/run/vc/sbs/*/persist.json"


def _hide_evidence(node: KataNode, target: str) -> None:
    at = _evidence(node)
    assert node.run("sh", "-c", f"for f in {at}; do mv $f $f.aside; done").is_ok


def _show_evidence(node: KataNode, target: str) -> None:
    at = f"{_evidence(node)}.aside"
    assert node.run("sh", "-c", f"for f in {at}; do mv $f ${{f%.aside}}; done").is_ok


@pytest.mark.parametrize(
    ("error", "says", "break_it", "mend_it"),
    [
        ("KataUnfit", "rootless is set", _configure, _configured),
        ("KataEntryForeign", "another program made an entry", _take_name, _free_name),
        ("GuardWithoutEntry", "no readable entry for it", _hide_entry, _show_entry),
        ("EngineTimeOver", "app was not prepared in time", _hang_configuration, _let_go),
        ("VmUnknown", "the virtual machine of sandbox", _hide_evidence, _show_evidence),
    ],
)
def test_refusal_leaves_nothing_and_pod_starts_without_its_cause(
    node: KataNode, volume: Volume, error: str, says: str, break_it: Fault, mend_it: Fault
) -> None:
    name, target = volume
    pod = node.pod(name)
    break_it(node, target)
    try:
        refused = node.container(pod, "app", target)
        assert f"[{error}]" in refused.text
        assert says in refused.text
    finally:
        mend_it(node, target)
    _check_nothing_stays(node)
    node.started(pod, "app", target, "echo x > /data/x && sleep 1000")
    assert node.claim()["sandbox_id"] == pod
    assert "/dev/loop" in node.open_in_machines()


def test_path_too_long_for_kata_is_refused_at_publish(node: KataNode, volume: Volume) -> None:
    """Kata's key is the path as the engine names it: a bind mount of the target has a name of its own."""
    name, target = volume
    long = name.replace("own", "own-long")
    assert "[PathTooLongForHandler]" in node.co("up", long).text
    assert node.co("down", long).is_ok
    alias = f"/run/alias-{'x' * 200}"
    assert node.run("sh", "-c", f"mkdir {alias} && mount --bind {target} {alias}").is_ok
    pod = node.pod(name)
    try:
        refused = node.container(pod, "app", alias)
    finally:
        assert node.run("sh", "-c", f"umount {alias} && rmdir {alias}").is_ok
    assert "[KataPathTooLong]" in refused.text
    assert f"the path has {len(alias)} bytes, and Kata's directory takes 189" in refused.text
    _check_nothing_stays(node)
    node.started(pod, "app", target)


def test_device_that_vanished_is_refused_until_published_again(
    node: KataNode, volume: Volume
) -> None:
    """A loop device in its place: the path is there, and the disk behind it is not."""
    name, target = volume
    device = node.device(target)
    pod = node.pod(name)
    assert node.run("losetup", "-d", device).is_ok
    refused = node.container(pod, "app", target)
    assert "[DeviceChanged]" in refused.text
    assert target in refused.text
    _check_nothing_stays(node)
    node.wait(lambda: node.co("unpublish", name).is_ok)
    node.wait(lambda: node.co("unstage", name).is_ok)
    again = node.co("up", name)
    assert again.is_ok, again.text
    node.wait(node.entries)
    node.started(pod, "app", target)


@pytest.mark.parametrize("volume", ["own-ro"], indirect=True)
def test_a_read_only_volume_is_not_written_or_is_refused(node: KataNode, volume: Volume) -> None:
    """runtime-rs would attach the device writable: it has it only if the device refuses writes itself."""
    name, target = volume
    pod = node.pod(name)
    answer = node.container(pod, "app", target)
    if node.is_rust:
        assert "[DeviceWritable]" in answer.text
        assert f"the volume at {target} cannot be given to a sandbox read-only" in answer.text
        _check_nothing_stays(node)
        assert node.run("blockdev", "--setro", node.device(target)).is_ok
        answer = node.container(pod, "again", target)
    assert answer.is_ok, answer.text
    container = answer.text.splitlines()[-1]
    assert node.cri("exec", container, "cat", "/data/x").text == "kept"
    assert "Read-only file system" in node.cri("exec", container, "touch", "/data/y").text


def test_a_sandbox_of_kata_s_other_runtime_is_refused(
    node: KataNode, volume: Volume, bridge: Daemon, tmp_path: Path
) -> None:
    """kata.toml names a configuration of the other runtime for this handler, and containerd its own one."""
    name, target = volume
    pod = node.pod(name)
    bridge.end()
    with _other_configuration(node, tmp_path):
        wrong = node.daemon("kata")
        refused = node.container(pod, "app", target)
        wrong.end()
    assert "[OtherKataRuntime]" in refused.text
    _check_nothing_stays(node)
    again = node.daemon("kata")
    try:
        node.started(pod, "app", target)
    finally:
        again.end()


@contextlib.contextmanager
def _other_configuration(node: KataNode, directory: Path) -> Iterator[None]:
    file, shim = node.state / "kata.toml", directory / "shim"
    before = file.read_text()
    (directory / "configuration.toml").write_text(OTHER[node.is_rust])
    shim.write_text(f"#!/bin/sh\necho '{RUST_SAYS}'\n")
    shim.chmod(0o755)
    named = f'name = "{node.handler}"\nconfiguration = "{directory}/configuration.toml"\n'
    says = "" if node.is_rust else f'shim = "{shim}"\n'
    file.write_text(f'default_runtime = "runc"\n[[runtimes]]\n{named}{says}')
    try:
        yield
    finally:
        file.write_text(before)


def test_pod_forbidding_block_devices_gets_no_host_directory(
    node: KataNode, volume: Volume
) -> None:
    """runtime-rs attaches it, unless the configuration lets the annotation count: then Kata refuses the container."""
    name, target = volume
    key = "io.katacontainers.config.hypervisor.disable_block_device_use"
    answer = node.container(node.pod(name, annotations=f'{{"{key}": "true"}}'), "app", target)
    if node.is_rust and answer.is_ok:
        shown = node.cri("exec", answer.text.splitlines()[-1], "grep", "/data", "/proc/mounts")
        assert "ext4" in shown.text
    elif node.is_rust:
        assert "unsupported driver type" in answer.text
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


def test_absent_bridge_stops_only_pods_that_require_it(
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


def test_container_without_its_volume_is_named_by_handlers(
    node: KataNode, volume: Volume, bridge: Daemon
) -> None:
    """A bind mount of the target is none of Kata's keys, and nothing of crust runs that would refuse it."""
    name, target = volume
    pod = node.pod(name)
    bridge.end(signal.SIGKILL)
    node.container(pod, "first", "")  # the engine notices the plugin's end by it
    alias = f"/run/alias-{name}"
    assert node.run("sh", "-c", f"mkdir {alias} && mount --bind {target} {alias}").is_ok
    node.started(pod, "app", alias)
    again = node.daemon("kata")
    try:
        node.wait(lambda: "RunsWithoutVolume" in node.crust_command("handlers").text)
        assert name in node.crust_command("handlers").text
        node.end_pod(pod)
        node.wait(lambda: "RunsWithoutVolume" not in node.crust_command("handlers").text)
    finally:
        node.run("sh", "-c", f"umount {alias}; rmdir {alias}")
        again.end()


def test_second_sandbox_of_pod_gets_no_disk_of_orphan(node: KataNode, volume: Volume) -> None:
    name, target = volume
    first = node.pod(name)
    app = node.started(first, "app", target, "echo first > /data/x; sync; sleep 1000")
    node.wait(lambda: node.cri("exec", app, "cat", "/data/x").text == "first")
    node.kill_shim(first)
    second = node.pod(name, attempt=1)
    if not node.has_orphans:
        node.wait(lambda: not node.machines(first))
    else:
        refused = node.container(second, "again", target)
        assert "[HeldBySandbox]" in refused.text
        assert first in refused.text
        assert node.is_hidden()
        node.end_orphan(first, target)
    node.started(second, "once-more", target)
    assert node.claim()["sandbox_id"] == second


def test_after_reboot_publish_is_replayed_and_data_is_there(
    node: KataNode, volume: Volume, bridge: Daemon
) -> None:
    """Everything of /run goes, with the machines and crust's daemons; the kubelet stages and publishes again."""
    name, target = volume
    pod = node.pod(name)
    app = node.started(pod, "app", target, "echo kept > /data/x; sync; sleep 1000")
    node.wait(lambda: node.cri("exec", app, "cat", "/data/x").text == "kept")
    bridge.end(signal.SIGKILL)
    node.crust.end(signal.SIGKILL)
    node.kill(node.run("pgrep", "-f", pod).text.split())  # shim, machine, keeper
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
