"""What this version does not read of a node: asked before a restart or a rollout ends the version that wrote it."""

from collections.abc import Iterator

from crust.blockdriver import schema, serve
from crust.blockdriver.engines.pool_access import UnknownPoolLayout
from crust.blockdriver.records import node_state
from crust.blockdriver.settings import LOCAL_ENGINES, DriverSettings
from crust.core import errors
from crust.core.settings.program import ProgramSettings
from crust.handoff.store import Store
from crust.host.process import syscalls
from crust.node.settings import NodeSettings
from crust.proxy.settings import ProxySettings


def unread(settings: ProgramSettings) -> Iterator[str]:
    """Why a daemon with these settings would refuse a pool, a volume in use, or an entry of the handoff directory."""
    node = settings if isinstance(settings, NodeSettings) else None
    for part in (node.proxy, *node.driver) if node else (settings,):
        if isinstance(part, ProxySettings):
            read = [entry.error for entry in Store(part.volumes_root).scan()]
            yield from (str(e) for e in read if e and e.error_name == "NewerHandoffSchema")
        for own in part.by_pool().values() if isinstance(part, DriverSettings) else ():
            yield from _of_pool(own)


def _of_pool(own: DriverSettings) -> Iterator[str]:
    """Of a pool that is away, and of a key of Ceph that is not taken, the driver tells itself."""
    try:
        home = serve.ENGINES[own.engine](own.model_copy(update={"create_pool": False})).home
        home.find()
        home.let_go()
    except errors.CrustError as error:
        is_away = own.engine not in LOCAL_ENGINES or isinstance(error, errors.PeerUnavailable)
        if isinstance(error, UnknownPoolLayout) or not is_away:
            yield str(error)
    for volume_id, file in node_state.read_all(f"{own.run_dir}/{syscalls.boot_id()}"):
        if isinstance(file, schema.OtherSchema):
            yield f"the node state of {volume_id}: {file}"
