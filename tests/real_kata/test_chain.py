"""A real Kata runtime, unmodified, under a real containerd: the life of a volume, and what is refused."""

import json
import secrets
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.real_kata.conftest import Daemon, KataNode, Volume


def test_container_writes_to_volume_and_unpublish_waits_for_sandbox(
    node: KataNode, volume: Volume
) -> None:
    name, target = volume
    assert node.is_hidden()
    pod = node.pod(name)
    container = node.started(pod, "app", target, "echo hello > /data/x; sync; sleep 1000")
    assert node.is_hidden()
    assert node.claim()["state"] == "mounted"
    node.wait(lambda: node.cri("exec", container, "cat", "/data/x").text == "hello")
    assert "ext4" in node.cri("exec", container, "grep", "/data", "/proc/mounts").text
    refused = node.co("unpublish", name)
    assert "HeldBySandbox" in refused.text
    assert pod in refused.text
    assert node.cri("stopp", pod).is_ok
    node.wait(lambda: node.co("unpublish", name).is_ok)
    assert node.entries() == {}


def test_statistics_are_the_guest_s_and_growth_is_refused(node: KataNode, volume: Volume) -> None:
    """The driver refuses it before the device grows: no kernel but the guest's mounts the volume."""
    name, target = volume
    pod = node.pod(name)
    app = node.started(pod, "app", target)
    node.cri("exec", app, "/bin/sh", "-c", "dd if=/dev/zero of=/data/f bs=1M count=8 && sync")
    total, used = map(int, node.co("stats", name).text.split())
    assert 40 << 20 < total < 64 << 20
    assert 8 << 20 <= used < total
    assert "[NobodyGrowsFilesystem]" in node.co("grow", name).text


@pytest.mark.parametrize("volume", ["wrapped"], indirect=True)
def test_new_wrapped_volume_is_formatted_once_and_keeps_data(
    node: KataNode, volume: Volume
) -> None:
    """The driver knows nothing of crust; its controller's shim says that the volume was created empty."""
    name, target = volume
    assert node.formatted(name) == 1
    first = node.pod(f"{name}-1")
    app = node.started(first, "app", target)
    assert node.cri("exec", app, "ls", "/data").text == "lost+found"
    node.cri("exec", app, "/bin/sh", "-c", "echo kept > /data/x; sync")
    node.end_pod(first)
    node.wait(lambda: node.co("unpublish", name).is_ok)
    assert node.co("unstage", name).is_ok
    again = node.co("up", name)
    assert again.is_ok, again.text
    node.wait(node.entries)
    app = node.started(node.pod(f"{name}-2"), "app", target)
    assert node.cri("exec", app, "cat", "/data/x").text == "kept"
    assert node.formatted(name) == 1


@pytest.mark.parametrize("volume", ["wrapped-xfs"], indirect=True)
def test_expanded_volume_keeps_its_size_until_host_pod_used_it(
    node: KataNode, volume: Volume
) -> None:
    """The driver of another vendor knows nothing of crust, and grows the device."""
    name, target = volume
    pod = node.pod(f"{name}-1")
    app = node.started(pod, "app", target, "echo kept > /data/x; sync; sleep 1000")
    node.wait(lambda: node.cri("exec", app, "cat", "/data/x").text == "kept")
    assert "[FilesystemNotGrown]" in node.co("grow", name).text
    node.end_pod(pod)
    node.wait(lambda: node.co("unpublish", name).is_ok)
    assert node.co("up", name).is_ok
    assert node.co("unpublish", name).is_ok
    assert node.co("unstage", name).is_ok
    on_host = node.co("on-host", name)
    assert on_host.is_ok, on_host.text
    again = node.co("up", name)
    assert again.is_ok, again.text
    node.wait(node.entries)
    app = node.started(node.pod(f"{name}-2"), "app", target)
    assert node.cri("exec", app, "cat", "/data/x").text == "kept"
    total, _ = map(int, node.co("stats", name).text.split())
    assert total > 500 << 20


@pytest.mark.parametrize("volume", ["own-xfs-grows"], indirect=True)
def test_volume_that_host_grows_has_new_size_at_next_start(node: KataNode, volume: Volume) -> None:
    name, target = volume
    pod = node.pod(f"{name}-1")
    app = node.started(pod, "app", target, "echo kept > /data/x; sync; sleep 1000")
    node.wait(lambda: node.cri("exec", app, "cat", "/data/x").text == "kept")
    assert "[FilesystemNotGrown]" in node.co("grow", name).text
    node.end_pod(pod)
    node.wait(lambda: node.co("unpublish", name).is_ok)
    again = node.co("up", name)
    assert again.is_ok, again.text
    node.wait(node.entries)
    app = node.started(node.pod(f"{name}-2"), "app", target)
    assert node.cri("exec", app, "cat", "/data/x").text == "kept"
    total, _ = map(int, node.co("stats", name).text.split())
    assert total > 500 << 20


def test_container_with_several_volumes_has_each_at_its_path(
    node: KataNode, publish: Callable[[str], Volume]
) -> None:
    published = [publish("own") for _ in range(4)]
    pod = node.pod(f"several-{secrets.token_hex(3)}")
    mounts = [{"host": target, "ctr": f"/data{at}"} for at, (_, target) in enumerate(published)]
    script = "for at in 0 1 2 3; do echo $at > /data$at/x; done; sync; sleep 1000"
    app = node.cri("ctr", pod, "app", json.dumps(mounts), "/bin/sh", "-c", script)
    assert app.is_ok, app.text
    container = app.text.splitlines()[-1]
    node.wait(lambda: node.cri("exec", container, "cat", "/data3/x").text == "3")
    shown = node.cri("exec", container, "grep", "-c", "/data. ext4", "/proc/mounts")
    assert shown.text == "4"
    assert node.cri("exec", container, "cat", "/data0/x", "/data1/x").text == "0\n1"
    assert node.is_hidden()
    for name, _ in published:
        assert "HeldBySandbox" in node.co("unpublish", name).text


def test_init_container_then_app_then_second_container_and_crash_loop(
    node: KataNode, volume: Volume
) -> None:
    name, target = volume
    pod = node.pod(name)
    first = node.started(pod, "init", target, "echo from-init > /data/i; sync")
    node.wait(lambda: not node.cri("exec", first, "true").is_ok)  # it has ended by itself
    node.cri("stop", first)
    node.cri("rm", first)
    app = node.started(pod, "app", target, "sleep 1000")
    assert node.cri("exec", app, "cat", "/data/i").text == "from-init"
    beside = node.container(pod, "sidecar", target)
    if node.is_rust:
        assert "[VolumeInUseInSandbox]" in beside.text
        node.cri("stop", app)
        node.cri("rm", app)
    else:
        assert beside.is_ok, beside.text
        assert node.cri("exec", beside.text.splitlines()[-1], "cat", "/data/i").text == "from-init"
    for at in range(3):
        crashed = node.started(pod, f"loop{at}", target, "test -e /data/i; exit 1")
        node.cri("stop", crashed)
        node.cri("rm", crashed)
    assert node.is_hidden()


def test_other_runtimes_paths_in_volume_and_other_sandboxes_are_refused(
    node: KataNode, volume: Volume
) -> None:
    name, target = volume
    pod = node.pod(name)
    inside = node.container(pod, "sub", f"{target}/sub")
    assert not inside.is_ok
    assert "no space left on device" in inside.text  # the engine's mkdir on the guard
    node.started(pod, "app", target)
    other = node.pod(f"{name}-runc", handler="runc")
    refused = node.container(other, "app", target)
    assert "[WrongRuntime]" in refused.text
    assert target in refused.text
    second = node.container(node.pod(f"{name}-2"), "app", target)
    assert "[HeldBySandbox]" in second.text
    assert pod in second.text
    node.cri("stopp", other)
    node.cri("rmp", other)


def test_without_bridge_kata_refuses_and_with_it_again_pod_starts(
    node: KataNode, volume: Volume, bridge: Daemon
) -> None:
    name, target = volume
    pod = node.pod(name)
    bridge.end(signal.SIGKILL)
    for at in range(2):  # the first create after its death may be the validator's to refuse
        refused = node.container(pod, f"app{at}", target)
        assert not refused.is_ok
    assert node.claim() == {}
    again = node.daemon("kata")
    try:
        container = node.started(pod, "app", target, "echo x > /data/x && sleep 1000")
        assert node.claim()["sandbox_id"] == pod
        again.end(signal.SIGKILL)
        node.wait(lambda: node.cri("exec", container, "cat", "/data/x").text == "x")
        assert "HeldBySandbox" in node.co("unpublish", name).text
    finally:
        again.end(signal.SIGKILL)


def test_killed_control_group_of_daemon_leaves_claim_to_keeper(
    node: KataNode, unit: Path, volume: Volume, bridge: Daemon
) -> None:
    name, target = volume
    for pid in bridge.pids():
        (unit / "cgroup.procs").write_text(str(pid))
    pod = node.pod(name)
    app = node.started(pod, "app", target, "echo x > /data/x; sync; sleep 1000")
    (unit / "cgroup.kill").write_text("1")
    bridge.process.wait(60)
    assert node.cri("exec", app, "cat", "/data/x").text == "x"
    assert "HeldBySandbox" in node.co("unpublish", name).text
    again = node.daemon("kata")
    try:
        node.cri("stop", app)
        node.started(pod, "again", target)
        assert node.claim()["sandbox_id"] == pod
    finally:
        again.end()


def test_killed_shim_leaves_volume_to_its_machine(node: KataNode, volume: Volume) -> None:
    """Kata's shim dies, its machine lives on, and the engine says that the sandbox is gone.

    With QEMU and the Go runtime the program that the engine starts to clean up ends the machine.
    """
    name, target = volume
    pod = node.pod(name)
    node.started(pod, "app", target)
    assert "[NotOrphaned]" in node.crust_command("end-orphan", "--yes", target).text
    node.kill_shim(pod)
    node.cri("stopp", pod)
    node.cri("rmp", pod)
    if not node.has_orphans:
        node.wait(lambda: not node.machines(pod))
        other = node.pod(f"{name}-2")
    else:
        assert "HeldBySandbox" in node.co("unpublish", name).text
        other = node.pod(f"{name}-2")
        assert "[HeldBySandbox]" in node.container(other, "app", target).text
        node.end_orphan(pod, target)
    node.started(other, "again", target)


def test_a_killed_machine_gives_the_volume_back(node: KataNode, volume: Volume) -> None:
    name, target = volume
    pod = node.pod(name)
    app = node.started(pod, "app", target)
    assert node.cri("exec", app, "true").is_ok
    node.kill(node.machines(pod))
    node.wait(lambda: node.co("unpublish", name).is_ok)
