"""`crust driver init-pool`: makes the pool that the settings name, of whichever program they are.

A node's settings file is `driver.toml` where the driver is a process of its own, and `node.toml` with a table
`driver` where it is a part of `crust node`. The pool is the same: whoever makes it must read the file that is used.
"""

import os
import tomllib
from typing import Any

import click

from crust.blockdriver.engines.files import memory_beside
from crust.blockdriver.engines.files.pool import DirectoryPool
from crust.cli.programs import daemons
from crust.core.settings import loading
from crust.core.settings.driver import LOCAL_ENGINES, DriverSettings
from crust.node.settings import NodeSettings

_TABLES = frozenset(NodeSettings.model_fields) - frozenset(DriverSettings.model_fields)


def make_pool(flags: dict[str, Any]) -> None:
    """Make the pool and print its id. Raises `InvalidSettings`, and why the pool cannot be made."""
    found = _settings(flags)
    memory = found.pool_id_file or memory_beside(found.state_dir)
    pool = DirectoryPool(found.state_dir, memory, create=True)
    pool.open()
    click.echo(pool.ids.pool_id)


def _settings(flags: dict[str, Any]) -> DriverSettings:
    """Of the file that --config names, else of the one that is installed; flags are stronger."""
    config = flags.pop("config", None) or daemons.installed("driver") or daemons.installed("node")
    given = {name: value for name, value in flags.items() if value is not None}
    text = daemons.text("driver", config) if config else ""
    if not _is_of_node(text):
        defaults = {"socket": "/run/crust/driver/csi.sock", "node_id": os.uname().nodename}
        return loading.load(
            DriverSettings, "driver", toml=text, environ=os.environ, flags=given, defaults=defaults
        )
    node = loading.load(NodeSettings, "node", toml=text, environ=os.environ, flags={})
    local = [each for each in node.driver if each.engine in LOCAL_ENGINES]
    if len(local) != 1:
        raise loading.InvalidSettings(
            "driver init-pool",
            f"{config} is of a node with {len(local)} drivers that have a pool of the node, and one is needed",
        )
    own = local[0].model_dump()
    return loading.load(DriverSettings, "driver", environ={}, flags=given, defaults=own)


def _is_of_node(text: str) -> bool:
    try:
        return bool(_TABLES & set(tomllib.loads(text)))
    except tomllib.TOMLDecodeError:
        return False  # loading it says what is wrong
