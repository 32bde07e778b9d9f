"""A mounted ext4 grows in a kernel that lets root do it: root of this machine may lack CAP_SYS_RESOURCE.

The driver has the capabilities that its unit leaves it, and no others.
"""

import shlex
import sys
from pathlib import Path

import pytest

from tests.support.nodes import kernel_node
from tests.unit.deploy.test_units import of

PLACES = """\
mkdir /run/tests; mount -t tmpfs tmpfs /run/tests
export TMPDIR=/run/tests TESTS_REQUIRE=mount,loop
exec unshare --mount --propagation private """
CASES = (
    "tests/integration/host/mounts/test_growth.py::test_grow_mounted_ext4_needs_cap_sys_resource",
    "tests/integration/blockdriver/test_node_expand.py::test_node_expand_grows_a_mounted_volume[ext4-67108864]",
)
"""Where the kernel of the tests refuses."""
pytestmark = pytest.mark.vm


@pytest.mark.parametrize("unit", ["node", "driver"])
async def test_mounted_ext4_grows_by_the_capabilities_of_a_unit(tmp_path: Path, unit: str) -> None:
    capabilities = of(unit, "CapabilityBoundingSet").lower().replace("cap_", "+").split()
    words = ("setpriv", "--no-new-privs", f"--bounding-set=-all,{','.join(capabilities)}")
    tests = (sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", "--timeout", "200")
    script = PLACES + shlex.join((*words, *tests, "--basetemp=/run/tests/t", *CASES))
    with kernel_node.network() as network:
        async with kernel_node.running(tmp_path, network) as node:
            code, output = await node.ask("/bin/sh", "-ec", script)
    assert (code, f"{len(CASES)} passed" in output) == (0, True), output
