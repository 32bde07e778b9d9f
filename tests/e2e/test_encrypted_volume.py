"""An encrypted volume of crust's own driver: only guests format, open and read it, and no file has the passphrase."""

import asyncio
from pathlib import Path

import pytest

from tests.support.whole_node import MIB, WholeNode

pytestmark = [
    pytest.mark.vm,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(240),
]
PASSPHRASE = "correct horse battery staple"
PLAINTEXT = "what a pod wrote"


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


def _contents(base: Path) -> dict[str, bytes]:
    """Every file of the node: state, records, entries, logs of all its processes, images of volumes."""
    files = (path for path in base.rglob("*") if path.is_file() and not path.is_symlink())
    return {str(path): path.read_bytes() for path in files}
