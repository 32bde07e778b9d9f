"""Which configurations of Kata may get a deferred volume; a change is noticed before the next container."""

from pathlib import Path

import pytest

from crust.core import volumes
from crust.kata.preflight import Configurations, KataUnfit, check, read
from tests.support.raised import raised

HANDLER = volumes.HandlerName("kata")
FIT = "[hypervisor.clh]\ndisable_block_device_use = false\n[runtime]\nenable_debug = false\n"


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
        ("[hypervisor.clh]\ndisable_block_device_use = false\nrootless = true", "rootless is set"),
        ("[hypervisor.remote]\ndisable_block_device_use = false", "peer pods"),
        (FIT + "name = 'virt_container'", "runtime-rs"),
        ("[hypervisor]\nclh = 1", "no table"),
        ("[hypervisor.clh", "cannot be read"),
    ],
)
def test_a_configuration_that_would_share_the_host_s_directory_is_named(
    tmp_path: Path, text: str, why: str
) -> None:
    path = _written(tmp_path / "configuration.toml", text)
    with pytest.raises(KataUnfit, match=why) as refused:
        check(path, read(path))
    assert str(path) in str(refused.value)


def test_a_fit_one_passes_and_a_drop_in_decides(tmp_path: Path) -> None:
    path = _written(tmp_path / "configuration.toml", FIT)
    check(path, read(path))
    drop_in = "[hypervisor.clh]\ndisable_block_device_use = true"
    _written(tmp_path / "config.d" / "10-x.toml", drop_in)
    with raised("KataUnfit"):
        check(path, read(path))
    _written(tmp_path / "config.d" / "20-y.toml", FIT)
    check(path, read(path))


def test_a_change_is_noticed_and_so_is_its_repair(tmp_path: Path) -> None:
    path = _written(tmp_path / "configuration.toml", FIT)
    configurations = Configurations({HANDLER: path})
    configurations.check(HANDLER)
    _written(tmp_path / "config.d" / "x.toml", "[hypervisor.clh]\ndisable_block_device_use = true")
    with raised("KataUnfit"):
        configurations.check(HANDLER)
    with raised("KataUnfit"):
        configurations.check(HANDLER)
    (tmp_path / "config.d" / "x.toml").unlink()
    configurations.check(HANDLER)
    path.unlink()
    with raised("KataUnfit"):
        configurations.check(HANDLER)
