"""An encrypted volume of crust's own driver: only guests format, open and read it, and no file has the passphrase."""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from crust.core import errors
from crust.wire.csi.v1 import csi_pb2
from tests.support.nodes.whole_node import MIB, WholeNode

pytestmark = [
    pytest.mark.vm,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(240),
]
PASSPHRASE = "correct horse battery staple"
PLAINTEXT = "what a pod wrote"
LUKS_HEADER_MIB = 16
BYTES = csi_pb2.VolumeUsage.BYTES


async def test_encrypted_volume_is_made_by_one_guest_and_opened_by_the_next(
    node: WholeNode,
) -> None:
    node.kubelet.parameters = {"crust.dev/encryption": "luks", "crust.dev/defer": "always"}
    node.kubelet.secrets = {"passphrase": PASSPHRASE}
    volume = await node.volume(size_bytes=64 * MIB)
    target = await node.publish(volume, defer=False)
    await node.output("one", target, f"echo '{PLAINTEXT}' > /data/file; sync")
    await node.runtime.stop("one")
    await node.unpublish(volume, target)
    await node.kubelet.unstage(volume)

    await node.kubelet.stage(volume)
    again = await node.publish(volume, defer=False)
    assert await node.output("two", again, "cat /data/file") == PLAINTEXT
    files = await asyncio.to_thread(_contents, node.daemons.paths.base)
    assert any(content.startswith(b"LUKS\xba\xbe\x00\x02") for content in files.values())
    assert [path for path, content in files.items() if PASSPHRASE.encode() in content] == []
    assert [path for path, content in files.items() if PLAINTEXT.encode() in content] == []


async def test_statistics_of_an_encrypted_volume_are_of_the_filesystem_in_it(
    node: WholeNode,
) -> None:
    node.kubelet.parameters = {"crust.dev/encryption": "luks", "crust.dev/defer": "always"}
    node.kubelet.secrets = {"passphrase": PASSPHRASE}
    volume = await node.volume(size_bytes=96 * MIB)
    target = await node.publish(volume, defer=False)
    await node.output("one", target, "true")
    before = (await node.kubelet.stats(volume, target))[BYTES]
    assert 0 < before.total < (96 - LUKS_HEADER_MIB) * MIB
    await node.output("one", target, "dd if=/dev/zero of=/data/f bs=1M count=16 2>/dev/null; sync")
    after = (await node.kubelet.stats(volume, target))[BYTES]
    assert after.total == before.total
    assert 15 * MIB <= after.used - before.used <= 17 * MIB


async def test_wrong_passphrase_is_what_crust_volumes_shows(node: WholeNode) -> None:
    """The command as an operator runs it; the row has the error's name and what to do, and no passphrase."""
    node.kubelet.parameters = {"crust.dev/encryption": "luks", "crust.dev/defer": "always"}
    node.kubelet.secrets = {"passphrase": PASSPHRASE}
    volume = await node.volume(size_bytes=64 * MIB)
    target = await node.publish(volume, defer=False)
    await node.output("one", target, "true")
    assert (await _shown(node, target))["state"] == "mounted"
    await node.runtime.stop("one")
    await node.unpublish(volume, target)
    await node.kubelet.unstage(volume)

    node.kubelet.secrets = {"passphrase": "wrong horse"}
    await node.kubelet.stage(volume)
    wrong = await node.publish(volume, defer=False)
    with pytest.raises(errors.CrustError, match="the passphrase does not open it"):
        await node.run("two", wrong, "true")
    row = await _shown(node, wrong)
    assert row["state"] == "published", "the sandbox has given the claim up, and its reason stays"
    assert "WrongPassphrase" in row["message"]
    assert "the passphrase does not open it" in row["message"]
    assert "wrong horse" not in str(row)
    files = await asyncio.to_thread(_contents, node.daemons.paths.base)
    assert [path for path, content in files.items() if b"wrong horse" in content] == []


async def _shown(node: WholeNode, target: Path) -> dict[str, Any]:
    """The row of `crust volumes` for a target."""
    run_dir = node.daemons.paths.crust_run
    flags = (f"--run-dir={run_dir}", f"--target={target}", "--output=json")
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "crust", "volumes", *flags), stdout=asyncio.subprocess.PIPE
    )
    output, _ = await process.communicate()
    (row,) = json.loads(output)["volumes"]
    assert isinstance(row, dict)
    return row


def _contents(base: Path) -> dict[str, bytes]:
    """Every file of the node: state, records, entries, logs of all its processes, images of volumes."""
    files = (path for path in base.rglob("*") if path.is_file() and not path.is_symlink())
    return {str(path): path.read_bytes() for path in files}
