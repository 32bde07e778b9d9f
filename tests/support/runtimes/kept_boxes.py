"""The runtime of docs/runtime-author.md with a hypervisor that takes no descriptors: keepers hold the claims.

kept_boxes.py REGISTRY_SOCKET OWN_SOCKET DIRECTORY [FAULT]. The "virtual machine" runs before the volume is claimed,
and mounts when it is told the device. FAULT: two processes `sleep` with the descriptors in the place of a keeper; or,
when a keeper has ended with its standby, the runtime

    forgets  to claim again
    spares   a machine whose volume another sandbox has, or had
    kills    the machine when it cannot claim, for any reason
    once     tries to claim, and not again
    trusts   that nobody had the volume meanwhile, and reads no claim.json
"""

import asyncio
import contextlib
import os
import signal
import sys
import time
from asyncio.subprocess import PIPE, create_subprocess_exec
from asyncio.subprocess import Process as Child
from pathlib import Path
from typing import ClassVar

from crust.core import errors, volumes
from crust.handoff import claims, layout
from crust.runtime_handler import (
    Claim,
    NotDeferred,
    Process,
    blocking,
    claim_volume,
    process_of,
    resolve_source,
)
from crust.runtime_handler.blocking import keepers, kept_vm
from examples import box_runtime
from examples.box_runtime import FEATURES, NAME, sh

BOOT = (
    "read -r disk type options; mount --make-rprivate / && "
    'mount -t "$type" -o "$options" "$disk" "$1" && echo up && exec sleep inf'
)


_AGAIN_S = 0.1
"""Between two attempts to claim again."""


class KeptBoxes(box_runtime.Boxes):
    """Sandboxes whose claims are in keepers."""

    fault = ""
    recovering: asyncio.Future[None] | None = None
    asleep: ClassVar[list[Child]] = []
    stopped: ClassVar[set[str]] = set()
    """Their machines end, and then their keepers: nothing is claimed again."""

    async def start(self, box: str, source: str) -> str:
        """The order of H-44: machine, claim, keeper, and then the device."""
        resolved = await resolve_source(self.root, source)
        if isinstance(resolved, NotDeferred):
            return "ordinary"
        self.stopped.discard(box)
        argv = ("unshare", "-m", "sh", "-c", BOOT, "sh", self.directory)
        vm = await create_subprocess_exec(*argv, stdin=PIPE, stdout=PIPE)
        try:
            target = resolved.require_whole().target
            wanted = (self.root, target, volumes.SandboxId(box), NAME)
            process = await process_of(vm.pid)
            claim = await claim_volume(*wanted, features=FEATURES, process=process)
            self.running[target] = (claim, vm)
            holders = await self._keep(box, claim, process)
            await self._attach(claim, vm)
        except errors.CrustError:
            await self._end(vm)
            await self.stop(box)
            raise
        await claim.hand_over(*holders)
        return "ok"

    async def stop(self, box: str) -> str:
        """The keeper needs a moment to see that the machine has ended."""
        self.stopped.add(box)
        for claim, vm in self.running.values():
            if claim.sandbox_id == box:
                await claim.close()
                for process in (vm, *self.asleep):
                    await self._end(process)
                await asyncio.to_thread(self._wait_until_free, claim.record.target, box)
        return await super().stop(box)

    def _wait_until_free(self, target: volumes.TargetPath, box: str) -> None:
        paths = layout.Layout(self.root).entry(target)
        while (held := claims.read(paths)) and held.live and held.sandbox_id in ("", box):
            time.sleep(0.05)

    async def _keep(self, box: str, claim: Claim, vm: Process) -> tuple[int, ...]:
        """Returns the processes that hold the claim from now on."""
        if self.fault == "sleep":
            for _ in range(2):
                sleep = await create_subprocess_exec("sleep", "inf", pass_fds=claim.fds)
                self.asleep.append(sleep)
            return tuple(process.pid for process in self.asleep)
        socket = Path(self.directory).parent / f"{box}.keeper"
        keeper = await asyncio.to_thread(keepers.start, socket, vm)
        keeper.hold("one", claim.fds)
        if self.fault != "forgets":
            sandbox = volumes.SandboxId(box)
            kept = kept_vm.KeptVm(self.root, NAME, sandbox, vm, socket)
            self._watch(keeper, kept, claim.record.target)
        return keeper.pids

    async def _attach(self, claim: Claim, vm: Child) -> None:
        assert vm.stdin is not None
        assert vm.stdout is not None
        mount, flags = claim.record.mount, ["--read-only"] * claim.record.readonly
        disk = await sh("losetup", "--find", "--show", *flags, claim.record.device)
        options = ",".join([*mount.mount_options, "ro" if mount.readonly else "rw"])
        vm.stdin.write(f"{disk} {mount.fs_type} {options}\n".encode())
        is_up = await vm.stdout.readline()
        await sh("losetup", "--detach", disk)
        if not is_up:
            raise errors.RuntimeFailed("the sandbox did not start", why="its mount failed")
        await claim.grow_and_report(
            lambda: sh("nsenter", "-m", "-t", str(vm.pid), "resize2fs", disk)
        )

    async def _end(self, vm: Child) -> None:
        with contextlib.suppress(ProcessLookupError):
            vm.kill()
        await vm.wait()

    def _watch(
        self, keeper: keepers.Keeper, kept: kept_vm.KeptVm, target: volumes.TargetPath
    ) -> None:
        """Have the claim again when the connection ends (H-46)."""

        def ended() -> None:
            asyncio.get_running_loop().remove_reader(keeper.fileno())
            keeper.close()
            if kept.sandbox_id in self.stopped:
                return
            self.recovering = asyncio.ensure_future(self._recover(kept, target))

        asyncio.get_running_loop().add_reader(keeper.fileno(), ended)

    async def _recover(self, kept: kept_vm.KeptVm, target: volumes.TargetPath) -> None:
        present = claims.read(layout.Layout(self.root).entry(target))
        another = present is not None and present.sandbox_id not in ("", kept.sandbox_id)
        if self.fault == "spares" and another:
            return
        while True:
            try:
                again = await asyncio.to_thread(self._claimed_again, kept, target)
            except (errors.NotFound, kept_vm.VmKilled):
                return  # the machine has ended
            except errors.CrustError:
                if self.fault == "kills":
                    os.kill(kept.process.pid, signal.SIGKILL)
                if self.fault in ("kills", "once"):
                    return
                await asyncio.sleep(_AGAIN_S)
            else:
                self._watch(again, kept, target)
                return

    def _claimed_again(self, kept: kept_vm.KeptVm, target: volumes.TargetPath) -> keepers.Keeper:
        if self.fault != "trusts":
            return kept.recover({"one": target})
        wanted = (self.root, target, kept.sandbox_id, NAME)
        claim = blocking.claim_volume(*wanted, features=FEATURES, process=kept.process)
        keeper = keepers.start(kept.socket, kept.process)
        keeper.hold("one", claim.fds)
        claim.hand_over(*keeper.pids)
        return keeper


if __name__ == "__main__":
    box_runtime.Boxes = KeptBoxes  # type: ignore[misc]
    KeptBoxes.fault = "".join(sys.argv[4:])
    asyncio.run(box_runtime.main(*sys.argv[1:4]))
