"""A runtime in 80 lines: a mount namespace stands in for its virtual machine, a second loop device for virtio-blk.

box_runtime.py REGISTRY_SOCKET OWN_SOCKET DIRECTORY; then lines on stdin: start SANDBOX MOUNT_SOURCE, stop SANDBOX
"""

import asyncio
import os
import sys
from asyncio.subprocess import PIPE, Process, create_subprocess_exec

from crust.core import errors, volumes
from crust.core.volumes import HandlerFeature
from crust.runtime_handler import Claim, NotDeferred, claim_volume, process_of, resolve_source
from crust.runtime_handler.registration import RegisterRequest, Registration
from crust.runtime_handler.service import Handler, serving

NAME = volumes.HandlerName("box")
FEATURES = frozenset({HandlerFeature.STATS, HandlerFeature.READ_ONLY, HandlerFeature.GROW})
BOOT = 'mount --make-rprivate / && mount -t "$2" -o "$3" "$1" "$4" && echo up && exec sleep inf'


async def sh(*argv: str) -> str:
    process = await create_subprocess_exec(*argv, stdout=PIPE, stderr=PIPE)
    out, err = await process.communicate()
    if process.returncode:
        raise errors.RuntimeFailed(f"{argv[0]} failed", why=err.decode(errors="replace"))
    return out.decode().strip()


class Boxes(Handler):
    def __init__(self, directory: str) -> None:
        self.directory, self.root = directory, ""
        self.running: dict[volumes.TargetPath, tuple[Claim, Process]] = {}

    async def start(self, box: str, source: str) -> str:
        resolved = await resolve_source(self.root, source)
        if isinstance(resolved, NotDeferred):
            return "ordinary"
        wanted = (self.root, resolved.require_whole().target, volumes.SandboxId(box), NAME)
        claim = await claim_volume(*wanted, features=FEATURES)
        try:
            vm, disk = await self.boot(claim)
            await claim.grow_and_report(
                lambda: sh("nsenter", "-m", "-t", str(vm.pid), "resize2fs", disk),
                process=await process_of(vm.pid),
            )
        except errors.CrustError as error:
            await claim.release(error=error.shown())  # `crust volumes` shows why
            raise
        # from here on the claim lives as long as the "virtual machine"
        await claim.hand_over(vm.pid)
        self.running[claim.record.target] = (claim, vm)
        return "ok"

    async def boot(self, claim: Claim) -> tuple[Process, str]:
        mount, flags = claim.record.mount, ["--read-only"] * claim.record.readonly
        disk = await sh("losetup", "--find", "--show", *flags, claim.record.device)
        options = ",".join([*mount.mount_options, "ro" if mount.readonly else "rw"])
        argv = ("sh", "-c", BOOT, "sh", disk, mount.fs_type, options, self.directory)
        vm = await create_subprocess_exec("unshare", "-m", *argv, pass_fds=claim.fds, stdout=PIPE)
        up = await vm.stdout.readline() if vm.stdout else b""
        await sh("losetup", "--detach", disk)  # the kernel does it after the last unmount
        if not up:
            raise errors.RuntimeFailed("the sandbox did not start", why="its mount failed")
        return vm, disk

    async def stop(self, box: str) -> str:
        for target, (claim, vm) in list(self.running.items()):
            if claim.sandbox_id == box:
                if vm.returncode is None:
                    vm.kill()
                await vm.wait()
                await claim.release()
                del self.running[target]
        return "ok"

    async def stats(self, target: volumes.TargetPath) -> volumes.VolumeStats:
        if target not in self.running:
            raise errors.NotReady(f"no sandbox has the volume at {target}")
        path = f"/proc/{self.running[target][1].pid}/root{self.directory}"
        s = await asyncio.to_thread(os.statvfs, path)
        sizes = (s.f_blocks, s.f_blocks - s.f_bfree, s.f_bavail)
        usage = volumes.VolumeUsage(volumes.UsageUnit.BYTES, *(n * s.f_frsize for n in sizes))
        return volumes.VolumeStats((usage,))


async def main(registry: str, own: str, directory: str) -> None:
    boxes = Boxes(directory)
    request = RegisterRequest(NAME, "1", own, frozenset({"ext4"}), FEATURES)
    async with serving(own, boxes), Registration(registry, request) as session:
        await session.registered.wait()
        boxes.root = session.response.volumes_directory if session.response else ""
        while words := (await asyncio.to_thread(sys.stdin.readline)).split():
            try:
                answer = await getattr(boxes, words[0])(*words[1:])
            except errors.CrustError as error:
                answer = f"refused {' '.join(error.shown().split())}"
            sys.stdout.write(f"{answer}\n")
            sys.stdout.flush()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:4]))
