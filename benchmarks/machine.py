"""The measured machine: facts that explain the figures, without names and paths."""

import datetime
import os
import platform
import time
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Description:
    """The properties to know before comparing two pages."""

    cores: int
    memory_gib: int
    processor: str
    kernel: str
    python: str
    grpc: str
    taken_on: str


def describe() -> Description:
    """Describe this machine."""
    return Description(
        cores=os.cpu_count() or 1,
        memory_gib=round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
        processor=_processor(),
        kernel=platform.release(),
        python=platform.python_version(),
        grpc=metadata.version("grpcio"),
        taken_on=datetime.datetime.now(datetime.UTC).date().isoformat(),
    )


def processor_s(pid: int) -> float:
    """The processor time of a process so far, its ended threads included: clock_getcpuclockid(3)."""
    return time.clock_gettime((~pid << 3) | 2)


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            return value.strip()
    return platform.machine()
