"""deploy/systemd: what each unit leaves its daemon is what docs/security.md says, and systemd knows the words."""

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
UNITS = sorted((ROOT / "deploy/systemd").iterdir())
NAMES = [unit.stem.removeprefix("crust-") for unit in UNITS]
CONFINING = ("driver", "node", "proxy")
"""The daemons that confine programs, by bwrap(1) and unshare(1)."""


def of(name: str, key: str) -> str:
    """The one value of a key of a unit."""
    (unit,) = (unit for unit in UNITS if unit.stem == f"crust-{name}")
    lines = unit.read_text(encoding="utf-8").splitlines()
    (value,) = (line.partition("=")[2] for line in lines if line.startswith(f"{key}="))
    return value


def documented() -> dict[str, set[str]]:
    """The capabilities by unit."""
    page = (ROOT / "docs/security.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(CAP_\w+)` \| .* \| (.*) \|$", page, re.MULTILINE)
    return {
        name: {capability for capability, units in rows if name in units.split(", ")}
        for name in NAMES
    }


@pytest.mark.parametrize("name", NAMES)
def test_units_have_the_capabilities_of_the_page_alone(name: str) -> None:
    given = of(name, "CapabilityBoundingSet").split()
    assert set(given) == documented()[name]
    assert given == sorted(given)
    known = subprocess.run(
        ["systemd-analyze", "capability", *given], capture_output=True, text=True, check=False
    )
    assert known.returncode == 0, known.stderr  # systemd itself leaves out what it does not know


@pytest.mark.parametrize("name", NAMES)
def test_unit_lets_its_daemon_make_few_namespaces(name: str) -> None:
    assert of(name, "RestrictNamespaces") == ("ipc mnt net pid uts" if name in CONFINING else "yes")


@pytest.mark.parametrize("name", NAMES)
def test_memory_of_a_daemon_reaches_no_file(name: str) -> None:
    assert (of(name, "LimitCORE"), of(name, "MemorySwapMax")) == ("0", "0")
