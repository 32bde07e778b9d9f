"""Kata's Go runtime: its word of a sandbox's machine and of the devices that this has, against the kernel's."""

import os
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crust.kata import go_runtime
from crust.kata.go_runtime import GoRuntime
from tests.support.kata import sandbox
from tests.support.raised import raised
from tests.support.records.records import a_record

ID = "e88fe84ff99ec42e"


@pytest.fixture
def running(tmp_path: Path) -> Iterator[sandbox.StandInSandbox]:
    with sandbox.running(tmp_path, ID) as made:
        yield made


def test_the_process_that_kata_names_is_the_machine(running: sandbox.StandInSandbox) -> None:
    evidence = GoRuntime(str(running.root))
    assert evidence.vm_of(ID) == evidence.vm_of(ID, running.pid) == running.pid


@pytest.mark.parametrize("told", [1, 2**31 - 1])
def test_an_engine_that_names_another_process_is_not_believed(
    running: sandbox.StandInSandbox, told: int
) -> None:
    with raised("VmUnknown"):
        GoRuntime(str(running.root)).vm_of(ID, told)


def test_process_without_sandboxs_id_is_not_its_machine(
    running: sandbox.StandInSandbox,
) -> None:
    running.write(pid=os.getpid())
    with raised("VmUnknown"):
        GoRuntime(str(running.root)).vm_of(ID)
    running.write(pid=0)
    with raised("VmUnknown"):
        GoRuntime(str(running.root)).vm_of(ID)


def test_a_machine_that_has_ended_is_not_known(running: sandbox.StandInSandbox) -> None:
    running.kill()
    with raised("VmUnknown"):
        GoRuntime(str(running.root)).vm_of(ID)


@pytest.mark.parametrize("id_", ["", "../../../x", "a/b", ".", "e88f", "x" * 9 + "\0"])
def test_an_id_is_not_a_path(running: sandbox.StandInSandbox, id_: str) -> None:
    evidence = GoRuntime(str(running.root))
    with raised("VmUnknown"):
        evidence.vm_of(id_)
    with raised("VmUnknown"):
        evidence.check_mounted(ID, running.pid, id_, {"/data": a_record()})


@given(st.binary(max_size=200))
def test_half_a_file_is_never_an_answer(
    tmp_path_factory: pytest.TempPathFactory, data: bytes
) -> None:
    root = tmp_path_factory.mktemp("sbs")
    (root / ID).mkdir()
    (root / ID / "persist.json").write_bytes(data)
    with mock.patch.object(go_runtime, "_AGAIN_S", 0), raised("VmUnknown"):
        GoRuntime(str(root)).vm_of(ID)


def test_sandbox_that_was_started_without_block_devices_gets_no_volume(
    running: sandbox.StandInSandbox,
) -> None:
    """By an annotation of its pod, or a configuration that kata.toml does not name."""
    evidence, record = GoRuntime(str(running.root)), a_record()
    evidence.check_attachable(ID, running.pid, [(record, 0)], 0.0)
    running.write(shares=True)
    with raised("SandboxWithoutBlockDevices", match="annotation"):
        evidence.check_attachable(ID, running.pid, [(record, 0)], 0.0)
    running.write(driver="nvdimm")
    with raised("SandboxWithNvdimm", match="annotation"):
        evidence.check_attachable(ID, running.pid, [(record, 0)], 0.0)
    (running.root / ID / "persist.json").write_text('{"Config":{}}')
    with raised("VmUnknown"):
        evidence.check_attachable(ID, running.pid, [(record, 0)], 0.0)


def test_mount_that_kata_attached_no_device_for_is_not_attached(
    running: sandbox.StandInSandbox,
) -> None:
    evidence, record = GoRuntime(str(running.root)), a_record()
    container = "0d6f2ee3b05ef01d"
    for device, destination, id_ in (
        (record.device, "/data", ""),
        (record.device, "/other", "1"),
        ("/dev/other", "/data", "1"),
        (record.device, "/data", "1"),  # Kata says so, and the machine does not have it open
    ):
        running.write_container(container, device, destination, id_=id_)
        with raised("VolumeNotAttached"):
            evidence.check_mounted(ID, running.pid, container, {"/data": record})
