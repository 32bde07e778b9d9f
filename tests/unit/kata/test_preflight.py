"""Which configurations of Kata may get a deferred volume; a change is noticed before the next container."""

import errno
import re
from pathlib import Path

import pytest

from crust.core import errors, volumes
from crust.kata.evidence import Kind
from crust.kata.preflight import Configurations, Installation, KataUnfit, check_configuration, read
from crust.kata.settings import KataRuntime
from tests.support.faults import lies
from tests.support.raised import raised

HANDLER = volumes.HandlerName("kata")
RUST = "[hypervisor.clh]\n[runtime]\nname = 'virt_container'\n"
RUST_QEMU = RUST.replace("clh]", "qemu]\nblock_device_driver = '{}'")
FIT = (
    "[hypervisor.clh]\ndisable_block_device_use = false\nblock_device_driver = 'virtio-blk'\n"
    "[runtime]\nenable_debug = false\n"
)
QEMU = "[hypervisor.qemu]\ndisable_block_device_use = false\n"


def _runtime(path: Path, shim: Path | str = "", *, unproven: bool = False) -> KataRuntime:
    return KataRuntime(name=HANDLER, configuration=str(path), shim=str(shim), unproven=unproven)


def _written(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "no table"),
        ("[hypervisor.clh]\npath = '/x'", "disable_block_device_use is not false"),
        (
            "[hypervisor.clh]\ndisable_block_device_use = true",
            "disable_block_device_use is not false",
        ),
        (
            "[hypervisor.qemu]\ndisable_block_device_use = 'false'",
            "disable_block_device_use is not false",
        ),
        (QEMU + "rootless = true", "rootless is set"),
        ("[hypervisor.remote]\ndisable_block_device_use = false", "peer pods"),
        (RUST, "version of Kata's shim is not known; set shim"),
        (
            FIT.replace("clh", "acrn"),
            "hypervisor is acrn, and clh and qemu alone was run.*; use clh or qemu; or set unproven = true",
        ),
        (
            FIT.replace("-blk", "-scsi"),
            "driver is virtio-scsi, and Kata attaches virtio-blk alone to Cloud Hypervisor",
        ),
        (
            FIT.replace("block_device_driver = 'virtio-blk'", ""),
            "where the key is missing it is virtio-scsi; set block_device_driver = .virtio-blk.",
        ),
        (QEMU + "block_device_driver = 'nvdimm'", "attaches a read-only volume writable"),
        (QEMU + "block_device_driver = 'virtio-blk-ccw'", "virtio-scsi and virtio-blk alone"),
        (QEMU.replace("qemu", "firecracker"), "Firecracker attaches every disk writable"),
        (QEMU.replace("qemu", "stratovirt"), "StratoVirt was never run with crust"),
        (FIT.replace("\n[r", "\nshared_fs = 'none'\n[r"), "shared_fs is none.*; set shared_fs ="),
        (
            FIT.replace("\n[r", "\nshared_fs = 'virtio-9p'\n[r"),
            "shared_fs is virtio-9p, and virtio-fs alone",
        ),
        (RUST.replace("clh", "openvmm"), "process of Cloud Hypervisor or QEMU alone is found"),
        (RUST.replace("[r", "block_device_driver = 'virtio-scsi'\n[r"), "and virtio-blk-pci alone"),
        (RUST_QEMU.format("nvdimm"), "attaches a read-only volume writable"),
        (
            RUST_QEMU.format("virtio-scsi").replace("[r", "disable_block_device_use = true\n[r"),
            "disable_block_device_use is not false: Kata would attach no disk",
        ),
        (RUST_QEMU.format("virtio-blk-ccw"), "virtio-scsi and virtio-blk-pci alone was run"),
        ("[hypervisor]\nclh = 1", "no table"),
        ("[hypervisor.clh", "cannot be read"),
    ],
)
def test_configuration_that_would_share_hosts_directory_is_named(
    tmp_path: Path, text: str, why: str
) -> None:
    path = _written(tmp_path / "configuration.toml", text)
    with pytest.raises(KataUnfit, match=why) as refused:
        check_configuration(_runtime(path), read(path))
    assert str(path) in str(refused.value)


def test_a_fit_one_passes_and_a_drop_in_decides(tmp_path: Path) -> None:
    path = _written(tmp_path / "configuration.toml", FIT)
    check_configuration(_runtime(path), read(path))
    drop_in = "[hypervisor.clh]\ndisable_block_device_use = true"
    _written(tmp_path / "config.d" / "10-x.toml", drop_in)
    with raised("KataUnfit"):
        check_configuration(_runtime(path), read(path))
    _written(tmp_path / "config.d" / "20-y.toml", FIT)
    check_configuration(_runtime(path), read(path))


def test_drop_in_counts_with_any_name_beside_the_real_file(tmp_path: Path) -> None:
    """As both runtimes of Kata 4.1 read them (katautils/config.go; kata-types, drop_in.rs)."""
    _written(tmp_path / "real" / "configuration.toml", FIT)
    (tmp_path / "etc").mkdir()
    link = tmp_path / "etc" / "configuration.toml"
    link.symlink_to("../real/configuration.toml")
    (tmp_path / "real" / "config.d" / "a-directory").mkdir(parents=True)
    unfit = "[hypervisor.clh]\ndisable_block_device_use = true"
    _written(tmp_path / "etc" / "config.d" / "10-x.toml", unfit)
    check_configuration(_runtime(link), read(link))
    _written(tmp_path / "real" / "config.d" / "50-local.conf", unfit)
    with raised("KataUnfit"):
        check_configuration(_runtime(link), read(link))


def test_a_change_is_noticed_and_so_is_its_repair(tmp_path: Path) -> None:
    path = _written(tmp_path / "configuration.toml", FIT)
    configurations = Configurations([_runtime(path)])
    configurations.check_kata(HANDLER)
    _written(tmp_path / "config.d" / "x.toml", "[hypervisor.clh]\ndisable_block_device_use = true")
    with raised("KataUnfit"):
        configurations.check_kata(HANDLER)
    with raised("KataUnfit"):
        configurations.check_kata(HANDLER)
    (tmp_path / "config.d" / "x.toml").unlink()
    configurations.check_kata(HANDLER)
    path.unlink()
    with raised("KataUnfit"):
        configurations.check_kata(HANDLER)


def _shim(path: Path, says: str) -> Path:
    script = f"#!/bin/sh\necho 'Kata Containers containerd shim {says}, commit: 0'\n"
    _written(path, script).chmod(0o755)
    return path


@pytest.mark.parametrize(
    ("text", "says", "kind", "version"),
    [
        (RUST, "(Rust): id: io.containerd.kata.v2, version: 4.1.0", Kind.RUST, (4, 1)),
        (FIT, '(Golang): id: "io.containerd.kata.v2", version: 3.30.0', Kind.GO, (3, 30)),
    ],
)
def test_the_shim_says_runtime_and_version(
    tmp_path: Path, text: str, says: str, kind: Kind, version: tuple[int, int]
) -> None:
    path = _written(tmp_path / "configuration.toml", text)
    shim = _shim(tmp_path / "containerd-shim-kata-v2", says)
    assert check_configuration(_runtime(path, shim), read(path)) == Installation(kind, version)
    other = {RUST: FIT, FIT: RUST}[text]
    _written(path, other)
    with pytest.raises(KataUnfit, match="is not that: Kata Containers containerd shim"):
        check_configuration(_runtime(path, shim), read(path))


@pytest.mark.parametrize("says", ["nothing", "(Rust): id: x, version: four"])
def test_a_program_that_is_no_shim_is_named(tmp_path: Path, says: str) -> None:
    path = _written(tmp_path / "configuration.toml", RUST)
    shim = _shim(tmp_path / "shim", says)
    for program in (shim, tmp_path / "absent"):
        with pytest.raises(KataUnfit, match=f"{program}.*; correct shim"):
            check_configuration(_runtime(path, program), read(path))


def test_untested_runtime_needs_setting_and_broken_one_never_passes(
    tmp_path: Path,
) -> None:
    path = _written(tmp_path / "configuration.toml", FIT.replace("clh", "acrn"))
    assert check_configuration(_runtime(path, unproven=True), read(path)).kind is Kind.GO
    _written(path, RUST)
    shim = _shim(tmp_path / "shim", "(Rust): id: io.containerd.kata.v2, version: 3.30.0")
    with pytest.raises(KataUnfit, match="drops the options"):
        check_configuration(_runtime(path, shim), read(path))
    assert check_configuration(_runtime(path, shim, unproven=True), read(path)).version == (3, 30)
    _written(path, RUST.replace("clh", "remote"))
    with pytest.raises(KataUnfit, match="peer pods"):
        check_configuration(_runtime(path, shim, unproven=True), read(path))
    for never, why in (
        ("openvmm", "process of Cloud Hypervisor or QEMU alone is found"),
        ("dragonball", "a thread of Kata's shim"),
        ("firecracker", "attaches every disk writable"),
        ("stratovirt", "never run with crust"),
    ):
        _written(path, RUST.replace("clh", never))
        with pytest.raises(KataUnfit, match=why):
            check_configuration(_runtime(path, shim, unproven=True), read(path))


@pytest.mark.parametrize("driver", ["", "virtio-scsi", "virtio-blk"])
def test_qemu_is_proven_with_its_default_driver_and_virtio_blk(tmp_path: Path, driver: str) -> None:
    key = f"block_device_driver = '{driver}'\n" if driver else ""
    path = _written(tmp_path / "configuration.toml", QEMU + key)
    assert check_configuration(_runtime(path), read(path)) == Installation(Kind.GO)


@pytest.mark.parametrize("driver", ["", "virtio-scsi", "virtio-blk-pci"])
def test_qemu_of_runtime_rs_is_proven_with_its_drivers(tmp_path: Path, driver: str) -> None:
    path = _written(tmp_path / "configuration.toml", RUST_QEMU.format(driver))
    shim = _shim(tmp_path / "shim", "(Rust): id: io.containerd.kata.v2, version: 4.1.0")
    assert check_configuration(_runtime(path, shim), read(path)) == Installation(Kind.RUST, (4, 1))


CACHE_SET = "block_device_cache_set = true\n"
DIRECT = "block_device_cache_direct = true\n"


@pytest.mark.parametrize(
    ("text", "todo"),
    [
        (f"{QEMU}{CACHE_SET}block_device_cache_noflush = true\n", "set block_device_cache_noflush"),
        (QEMU, "set block_device_aio = .threads"),
        (f"{QEMU}block_device_aio = ''\n", "set block_device_aio = .threads"),
        (
            f"{QEMU}{DIRECT}",
            "set block_device_aio = .threads",
        ),  # read only beside block_device_cache_set
        (f"{QEMU}{CACHE_SET}{DIRECT}", ""),
        (f"{QEMU}block_device_aio = 'threads'\n", ""),
        (f"{QEMU}block_device_driver = 'virtio-blk'\nblock_device_cache_noflush = true\n", ""),
        (RUST_QEMU.format("virtio-scsi"), "set block_device_aio = .threads"),
        (RUST_QEMU.format("virtio-scsi").replace("[r", f"{DIRECT}[r"), ""),
        (RUST_QEMU.format("virtio-blk-pci"), ""),
        (FIT, ""),
    ],
)
def test_hypervisor_that_loses_flushes_of_guests_is_named(
    tmp_path: Path, text: str, todo: str
) -> None:
    path = _written(tmp_path / "configuration.toml", text)
    says = "(Rust)" if "virt_container" in text else "(Golang)"
    shim = _shim(tmp_path / "shim", f"{says}: id: io.containerd.kata.v2, version: 4.1.0")
    found = check_configuration(_runtime(path, shim, unproven=True), read(path)).flushes_dropped
    assert re.search(todo, str(found)) if todo else found is None


def test_upgrade_while_daemon_runs_is_refused_until_it_registers_again(
    tmp_path: Path,
) -> None:
    path = _written(tmp_path / "configuration.toml", RUST)
    shim = _shim(tmp_path / "shim", "(Rust): id: io.containerd.kata.v2, version: 4.1.0")
    configurations = Configurations([_runtime(path, shim)])
    configurations.check_kata(HANDLER)
    _shim(shim, "(Rust): id: io.containerd.kata.v2, version: 4.20.0")
    with pytest.raises(KataUnfit, match="restart crust kata"):
        configurations.check_kata(HANDLER)
    _shim(shim, "(Rust): id: io.containerd.kata.v2, version: 4.1.0")
    configurations.check_kata(HANDLER)


@pytest.mark.parametrize("number", [errno.EACCES, errno.EMFILE, errno.ENOTDIR])
def test_drop_ins_that_are_not_seen_are_not_absent(tmp_path: Path, number: int) -> None:
    """One of them may forbid block devices."""
    path = _written(tmp_path / "configuration.toml", FIT)
    drop_ins = lies.Concerns(frozenset({f"{tmp_path}/config.d"}), ())
    for look in (lambda: read(path), lambda: Configurations([_runtime(path)]).check_kata(HANDLER)):
        with lies.failing(drop_ins, lies.Failure(0, number)), raised("KataUnfit", match="config.d"):
            look()


def test_file_that_is_not_seen_is_not_unchanged(tmp_path: Path) -> None:
    path = _written(tmp_path / "configuration.toml", FIT)
    configurations = Configurations([_runtime(path)])
    configurations.check_kata(HANDLER)
    with (
        lies.failing(lies.Concerns(frozenset({str(path)}), ()), lies.Failure(0, errno.EIO)),
        pytest.raises(errors.RuntimeFailed, match="EIO"),
    ):
        configurations.check_kata(HANDLER)
