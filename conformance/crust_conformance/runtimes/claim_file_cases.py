"""What claim.json says, and how it is written and replaced."""

import json
import os
from pathlib import Path
from typing import Any

from crust.core import volumes
from crust_conformance.runtimes.file_opens import paused
from crust_conformance.runtimes.subject import RuntimeUnderTest

_ODD_ID = "box-\x7f"
_NEXT_SECOND_S = 1.1
"""After this a time of whole seconds is another one."""


class _Files:
    """The files that were claim.json when the runtime opened a file of the entry, the last one too."""

    def __init__(self, claim: str) -> None:
        self._claim = claim
        self._seen: dict[int, os.stat_result] = {}
        self._is_begun = False

    async def record(self, subject: RuntimeUnderTest, target: str) -> None:
        """Start a sandbox that must start."""
        with paused(os.path.dirname(self._claim), self._look):
            await subject.started("box-1", target)
        self._add()
        for content in self.contents():
            subject.transcript.append(f"(claim.json: {content.decode(errors='replace').strip()})")

    def _look(self, path: str) -> float:
        """Delays the first open of a file that becomes claim.json: a later `claimed_at` would be another one."""
        self._add()
        is_new = os.path.basename(path).startswith(".") or path == self._claim
        pause_s = _NEXT_SECOND_S if is_new and not self._is_begun else 0.0
        self._is_begun = self._is_begun or is_new
        return pause_s

    def _add(self) -> None:
        try:
            file = os.open(self._claim, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            return
        status = os.fstat(file)
        if any(os.path.samestat(status, seen) for seen in self._seen.values()):
            os.close(file)
        else:
            self._seen[file] = status

    def contents(self) -> list[bytes]:
        """What they have now, in their order."""
        return [Path(f"/proc/self/fd/{file}").read_bytes() for file in self._seen]

    def changed(self) -> bool:
        """Whether a file was written to after it was seen as claim.json."""
        return any(_version(os.fstat(file)) != _version(seen) for file, seen in self._seen.items())

    def close(self) -> None:
        for file in self._seen:
            os.close(file)


def _version(status: os.stat_result) -> tuple[int, int]:
    return status.st_size, status.st_mtime_ns


async def test_r116_process(subject: RuntimeUnderTest) -> None:
    target = await subject.running()
    claim = _claim(Path(subject.proxy.paths(target).claim).read_bytes())
    pid, process = claim.get("pid"), claim.get("process") or {}
    subject.transcript.append(
        f"(claim.json: pid {pid}, process {process}; {subject.holders_text(target)})"
    )
    hypervisors = subject.other_holders(target)
    if process:
        assert process.get("pid") == pid, "pid and process name two processes"
    elif hypervisors:
        assert pid in hypervisors, (
            f"pid is {pid}, which has not claim.lock open: it must be the hypervisor's, and process be there where "
            "a keeper has the lock"
        )


async def test_r117_claimed_at(subject: RuntimeUnderTest) -> None:
    target = await subject.volume()
    files = _Files(subject.proxy.paths(target).claim)
    try:
        await files.record(subject, target)
        times = {_claim(content).get("claimed_at") for content in files.contents()} - {None}
    finally:
        files.close()
    assert len(times) == 1, f"claimed_at has changed: {', '.join(sorted(map(str, times)))}"


async def test_r118_rename(subject: RuntimeUnderTest) -> None:
    target = await subject.volume()
    files = _Files(subject.proxy.paths(target).claim)
    try:
        await files.record(subject, target)
        assert not files.changed(), "claim.json was written to while it had that name"
    finally:
        files.close()


async def test_r130_control_character(subject: RuntimeUnderTest) -> None:
    target = await subject.volume()
    answer = await subject.send("start", _ODD_ID, target)
    if answer == "ok":
        claim = _claim(Path(subject.proxy.paths(target).claim).read_bytes())
        await subject.stop(_ODD_ID)
        assert not volumes.CONTROL.search(str(claim.get("sandbox_id"))), (
            f"sandbox_id is {claim.get('sandbox_id')!r}"
        )


def _claim(content: bytes) -> dict[str, Any]:
    """The object; empty if it is not complete, which R-118 reports."""
    try:
        claim = json.loads(content)
    except ValueError:
        return {}
    return claim if isinstance(claim, dict) else {}
