"""What this process may do, and which boot this is."""

from pathlib import Path

from crust.host.process import boot, capabilities


def test_effective_capabilities_match_proc_status() -> None:
    line = next(
        line
        for line in Path("/proc/self/status").read_text().splitlines()
        if line.startswith("CapEff")
    )
    mask = int(line.split()[1], 16)
    assert capabilities.effective() == mask
    assert capabilities.has_cap_sys_resource() == bool(mask & 1 << 24)


def test_boot_id_is_a_constant_uuid() -> None:
    assert boot.boot_id() == boot.boot_id()
    assert len(boot.boot_id().split("-")) == 5
