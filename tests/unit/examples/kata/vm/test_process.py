"""A VM's process, without a VM."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

from examples.kata.vm import process


def _fifo(directory: Path) -> Path:
    os.mkfifo(directory / "stderr")
    return directory / "stderr"


async def test_a_started_process_is_waited_for_and_reaped(tmp_path: Path) -> None:
    running = process.Process(process.spawn(["/bin/sleep", "1000"], [], _fifo(tmp_path)))
    assert running.runs()
    assert os.getsid(running.pid) == running.pid
    waits = [asyncio.create_task(running.wait()) for _ in range(2)]
    await asyncio.sleep(0)
    running.kill(signal.SIGTERM)
    await asyncio.gather(*waits)
    assert not running.runs()
    running.kill()
    assert not Path(f"/proc/{running.pid}").exists()
    running.close()
    running.close()


async def test_only_the_descriptors_that_are_passed_are_inherited(tmp_path: Path) -> None:
    kept, secret = socket.socketpair()
    with kept, secret:
        script = "ls -l /proc/self/fd > $0"
        argv = ["/bin/sh", "-c", script, str(tmp_path / "listing")]
        running = process.Process(process.spawn(argv, [kept.fileno()], _fifo(tmp_path)))
        await running.wait()
        running.close()
        names = [os.readlink(f"/proc/self/fd/{s.fileno()}") for s in (kept, secret)]
    listing = (tmp_path / "listing").read_text()
    assert names[0] in listing
    assert names[1] not in listing


def test_find_ignores_a_reused_pid(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    assert process.find(pid_file, "uuid") is None
    argv = [sys.executable, "-c", "print(flush=True); input()", "uuid-1"]
    child = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdout is not None
    child.stdout.readline()
    try:
        pid_file.write_text(f"{child.pid}\n")
        vm_process = process.find(pid_file, "uuid-1")
        assert vm_process is not None
        vm_process.close()
        assert process.find(pid_file, "uuid-2") is None
        assert process.find(pid_file, "uuid") is None
    finally:
        child.communicate(b"\n")
    assert process.find(pid_file, "uuid-1") is None
    pid_file.write_text("")
    assert process.find(pid_file, "uuid-1") is None
