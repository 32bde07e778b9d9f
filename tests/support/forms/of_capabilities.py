"""What a daemon does only by a capability that its unit leaves it, where no other entry of the list needs that.

On a node without other users, with nodes of all loop devices, most of the list runs as root without any of these.
"""

from contextlib import nullcontext

import grpc

from crust.rpc import channel
from crust.wire.csi.v1 import csi_pb2, csi_pb2_grpc
from tests.support.co import MIB, capability
from tests.support.faults.refusals import until_probe
from tests.support.forms.form import ANSWER_S, TARGET, VENDORS_SOCKET, Form, staged
from tests.support.forms.kata_beside import AS_STRANGER, STRANGER
from tests.support.forms.units import KataUnits, Units

GROUP = 3000
PRIVATE = (
    f"mkdir -m 700 {TARGET}/d; echo written >{TARGET}/d/f; chown --recursive {STRANGER} {TARGET}/d"
)
RUNS = "import sys; print('runs', flush=True); sys.stdin.read()"
KEEPER = "runtime_handler/keeper[.]py"
LOOPS = 64
"""Of a machine of the tests (`tests.support.booted_systemd`)."""
SMALL, LARGE = 320 * MIB, 400 * MIB


async def beside_another_user(form: Form) -> None:
    """The open files of its process are seen before a guest has a device, and before the host has it again."""
    with form.running(*AS_STRANGER, "/usr/bin/python3", "-IS", "-c", RUNS) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line == "runs\n", line
        async with staged(form) as volume:
            await volume.publish()
            with form.sandbox():
                pass
            await volume.unpublish()
            await volume.publish(defer=False)
            await volume.unpublish()


async def private_directory(form: Form) -> None:
    """FsGroup is applied to a directory that its owner alone may enter."""
    async with staged(form) as volume:
        await volume.publish(defer=False)
        form.output("sh", "-ec", PRIVATE)
        await volume.unpublish()
        await volume.publish(defer=False, given=capability(volume_mount_group=str(GROUP)))
        assert form.output("stat", "--format=%g", f"{TARGET}/d/f") == f"{GROUP}\n"
        await volume.unpublish()


async def device_without_a_node(form: Form) -> None:
    """No devtmpfs makes the node of a loop device here."""
    made = f"for n in $(seq 0 {LOOPS - 1}); do [ -e /dev/loop$n ] || mknod -m 600 /dev/loop$n b 7 $n; done"
    form.output("sh", "-ec", "rm -f /dev/loop[0-9]*")
    try:
        async with staged(form):
            pass
    finally:
        form.output("sh", "-ec", made)


async def mounted_ext4_grows(form: Form) -> None:
    """Online, as a pod needs it whose volume is full."""
    async with staged(form, size=SMALL) as volume:
        await volume.publish(defer=False)
        await volume.co.grow(volume.id, LARGE)
        assert (await volume.co.expand(volume.id, TARGET, LARGE)).capacity_bytes >= LARGE
        await volume.unpublish()


async def driver_of_another_user(form: Units, shim: str, socket: str, drivers_socket: str) -> None:
    """The unit of a shim connects to a driver whose socket is its user's alone."""
    connects = f"systemctl restart {shim}"
    of_user = f"chown {STRANGER} {drivers_socket}; chmod 700 {drivers_socket}; {connects}"
    with form.vendors_driver() if drivers_socket == VENDORS_SOCKET else nullcontext():
        async with channel.connect(form.machine.seen(socket)) as connected:
            await until_probe(connected, grpc.StatusCode.OK)
        form.output("sh", "-ec", of_user)
        try:
            async with channel.connect(form.machine.seen(socket)) as connected:
                identity: csi_pb2_grpc.IdentityAsyncStub = csi_pb2_grpc.IdentityStub(connected)
                await identity.Probe(csi_pb2.ProbeRequest(), timeout=ANSWER_S)
        finally:
            form.output("sh", "-ec", f"chown 0 {drivers_socket}; {connects}")


async def container_of_another_user(form: KataUnits) -> None:
    """One of another runtime is ended that runs on the guard mount."""
    async with staged(form) as volume:
        await volume.publish()
        form.end_container_of_another_user()
        await volume.unpublish()


async def keeper_without_memory(form: KataUnits) -> None:
    """The kernel ends every other process before a keeper, or its virtual machine would lose the claim."""
    async with staged(form) as volume:
        await volume.publish()
        with form.sandbox():
            scores = form.output(
                "sh", "-ec", f"cat $(pgrep -f {KEEPER} | sed 's,.*,/proc/&/oom_score_adj,')"
            )
            assert scores == "-1000\n", f"oom_score_adj {scores}"
        await volume.unpublish()
