"""The engine for sparse files in one directory, attached by loop devices."""

import os

from crust.blockdriver.engines.files.access import FileAccess
from crust.blockdriver.engines.files.directories import (
    RECORDS,
    Directories,
    FileRecords,
    Reserve,
    VolumeDirectories,
)
from crust.blockdriver.engines.files.pool import DirectoryPool
from crust.blockdriver.engines.files.provisioning import FileProvisioning
from crust.blockdriver.engines.pool_access import RecordKind
from crust.blockdriver.engines.protocol import Engine

_SMALL_BYTES = 64 * 1024
_LARGE_BYTES = 16 * 1024 * 1024
"""More than the record of a group whose volumes fill one gRPC message."""


def engine(directory: str, memory: str = "", *, create: bool = False) -> Engine:
    """The engine with the pool in `directory`, without I/O; `memory` and `create` as `DirectoryPool` has them."""
    # by default beside the pool's directory, and so not on its disk
    memory = memory or f"{os.path.normpath(directory)}.pool-id"
    pool = DirectoryPool(directory, memory, create=create)
    reserve = Reserve(pool.directory / "records.reserve")
    directories = VolumeDirectories(
        pool.directory / RecordKind.VOLUMES.value,
        RecordKind.VOLUMES,
        lambda text: pool.ids.is_volume_id(text),
        reserve,
    )
    sets = Directories(
        pool.directory / RecordKind.SNAPSHOTS.value,
        RecordKind.SNAPSHOTS,
        lambda text: pool.ids.is_set_id(text),
        reserve,
    )
    access = FileAccess(directories)
    provisioning = FileProvisioning(directories, sets, access)

    def records(kind: RecordKind) -> FileRecords:
        if kind is RecordKind.SNAPSHOTS:
            return FileRecords(sets.directory, RECORDS[kind], reserve, _LARGE_BYTES)
        return FileRecords(directories.directory, RECORDS[kind], reserve, _SMALL_BYTES)

    return Engine(pool, provisioning, access, records, None, pool.directory / "tools.lock")
