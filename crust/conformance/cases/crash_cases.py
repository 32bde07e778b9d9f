"""A driver that is killed between any two calls, and during them (C-701 to C-708)."""

import subprocess
import tempfile
from typing import Any

from crust.conformance.capabilities import STAGE
from crust.conformance.orchestrator import copies, expansion
from crust.conformance.orchestrator.calls import Code
from crust.conformance.orchestrator.co import Co

_PRINTED_BYTES = 2000
_DATA = b"written before the crash"


def test_c701_lifecycle_survives_restart_after_each_call(co: Co) -> None:
    request = co.create_request()
    volume = co.create(request)
    _restart(co)
    again = co.until_final(request).volume
    assert again.volume_id == volume.volume_id
    co.stage(volume)
    _restart(co)
    target = co.publish(volume)
    co.host.write(target / "file", _DATA)
    _restart(co)
    assert co.file(target) == _DATA
    co.until_final(co.publish_request(volume, target))
    assert co.host.mounts_at(target) == 1
    co.unpublish(volume.volume_id, target)
    assert not co.host.mounts_at(target)
    _restart(co)
    co.unpublish(volume.volume_id, target)
    co.unstage(volume)
    _restart(co)
    co.unstage(volume)
    co.detach(volume.volume_id)
    _restart(co)
    assert co.file(co.use(volume)) == _DATA


def test_c702_calls_killed_midway_succeed_when_retried(co: Co) -> None:
    requests = [co.create_request() for _ in range(4)]
    futures = [co.begun(each, 10) for each in requests]
    _restart(co)
    for future in futures:
        future.cancel()
    volumes = [co.until_final(each).volume for each in requests]
    assert len({each.volume_id for each in volumes}) == len(requests)
    volume = volumes[0]
    co.attach(volume)
    target = co.target()
    if STAGE in co.has:
        _killed_during(co, co.stage_request(volume))
    co.stage(volume)
    publish = co.publish_request(volume, target)
    _killed_during(co, publish)
    co.until_final(publish)
    assert co.host.mounts_at(target) == 1
    co.host.write(target / "file", _DATA)


def test_c703_a_crash_during_a_snapshot_leaves_the_volume_usable(co: Co) -> None:
    volume, target = co.used(file=_DATA)
    request = copies.snapshot_request(co, volume.volume_id)
    _killed_during(co, request)
    co.host.write(target / "other", _DATA)
    made = copies.take(co, request)
    restored = co.volume(source=copies.of_snapshot(made.snapshot_id))
    assert co.file(co.use(restored)) == _DATA


def test_c704_snapshot_and_restore_survive_restart_after_each_call(co: Co) -> None:
    volume, target = co.used(file=_DATA)
    request = copies.snapshot_request(co, volume.volume_id)
    made = copies.take(co, request)
    _restart(co)
    again = co.until_final(request).snapshot
    assert again.snapshot_id == made.snapshot_id
    assert again.creation_time == made.creation_time
    co.host.write(target / "file", b"something else altogether")
    create = co.create_request(source=copies.of_snapshot(made.snapshot_id))
    restored = co.create(create)
    _restart(co)
    once_more = co.until_final(create).volume
    assert once_more.volume_id == restored.volume_id
    copies.delete(co, made.snapshot_id)
    _restart(co)
    copies.delete(co, made.snapshot_id)
    assert co.file(co.use(restored)) == _DATA


def test_c705_clone_killed_midway_succeeds_when_retried(co: Co) -> None:
    volume, target = co.used(file=_DATA)
    request = co.create_request(source=copies.of_volume(volume.volume_id))
    _killed_during(co, request)
    clone = co.until_final(request).volume
    _restart(co)
    again = co.until_final(request).volume
    assert again.volume_id == clone.volume_id
    co.host.write(target / "file", b"something else altogether")
    assert co.file(co.use(clone)) == _DATA


def test_c706_expansion_killed_midway_succeeds_when_retried(co: Co) -> None:
    volume, target = co.used(file=_DATA)
    sized, before = expansion.has_its_own_size(co, volume, target), co.host.size_bytes(target)
    halves: tuple[Any, ...] = (
        expansion.controller_request(co, volume),
        expansion.node_request(co, volume, target),
    )
    for request in halves:
        _killed_during(co, request)
        co.until_final(request)
    _restart(co)
    assert not sized or co.host.size_bytes(target) >= 1.6 * before
    assert co.file(target) == _DATA


def test_c707_group_snapshot_killed_midway_succeeds_when_retried(co: Co) -> None:
    volumes = [co.volume() for _ in range(2)]
    targets = [co.use(each) for each in volumes]
    for target in targets:
        co.host.write(target / "file", _DATA)
    request = copies.group_request(co, [each.volume_id for each in volumes])
    _killed_during(co, request)
    for target in targets:
        co.host.write(target / "other", _DATA)
    made = copies.take_group(co, request)
    _restart(co)
    assert copies.members(copies.take_group(co, request)) == copies.members(made)
    for member in made.snapshots:
        restored = co.volume(source=copies.of_snapshot(member.snapshot_id))
        assert co.file(co.use(restored)) == _DATA
    deletion = copies.group_deletion(co, made)
    _killed_during(co, deletion)
    co.until_final(deletion)


def test_c708_unpublish_to_delete_killed_midway_succeeds_when_retried(co: Co) -> None:
    volume, target = co.used()
    unpublish = co.unpublish_request(volume.volume_id, target)
    _killed_during(co, unpublish)
    co.unpublish(volume.volume_id, target)
    assert not co.host.mounts_at(target)
    assert not target.exists()
    if STAGE in co.has:
        _killed_during(co, co.unstage_request(volume))
    co.unstage(volume)
    co.detach(volume.volume_id)
    delete = co.delete_request(volume.volume_id)
    _killed_during(co, delete)
    co.until_final(delete)
    validate = co.validate_request(volume, co.mount)
    co.answered(validate, Code.NOT_FOUND)


def _killed_during(co: Co, request: Any) -> None:
    """The driver dies at a random point of the call; the retry must succeed wherever that was."""
    running = co.begun(request)
    _restart(co)
    running.cancel()


def _restart(co: Co) -> None:
    """The operator's command kills the driver and starts it again; it serves when Probe says so."""
    run_restart_command(co.options.restart_command, co.options.timeout_s)
    co.until_ready()


def run_restart_command(command: str, timeout_s: float) -> None:
    """Run it with `sh -c`, to its end. Raises AssertionError, with its output, if it fails or takes too long.

    What it starts inherits its output and lives on, so the output goes to a file: a pipe would end with the driver
    only, and a reader of the pipe would wait for that.
    """
    with tempfile.TemporaryFile() as output:
        try:
            ended = subprocess.run(
                ["/bin/sh", "-c", command],
                check=False,
                timeout=timeout_s,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
            how = f"ended with {ended.returncode}" if ended.returncode else ""
        except subprocess.TimeoutExpired:
            how = f"did not return within {timeout_s:g} s"
        output.seek(0)
        printed = output.read().decode(errors="replace")[-_PRINTED_BYTES:].strip()
    assert not how, f"the restart command {how}: {printed or 'it printed nothing'}"
