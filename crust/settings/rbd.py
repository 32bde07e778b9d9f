"""The settings of the engine `rbd`: which Ceph pool, and as which user."""

from typing import Annotated, Literal

from pydantic import Field

from crust.settings.fields import AbsolutePath
from crust.settings.program import Table


class RbdSettings(Table):
    """The Ceph pool of `engine = "rbd"`. An administrator makes the pool, the namespace and the users."""

    monitors: Annotated[str, Field(min_length=1, max_length=4096)]
    """The monitors' addresses, each with its protocol, as `ceph mon dump` shows them:
    [v2:192.0.2.1:3300,v1:192.0.2.1:6789]."""

    pool: Annotated[str, Field(min_length=1, max_length=128)]
    """The pool, which `rbd pool init` was run for."""

    namespace: Annotated[str, Field(pattern=r"^[^/@]*$", max_length=128)] = ""
    """The namespace of the pool, for this driver alone; empty: the pool's default one."""

    user: Annotated[str, Field(max_length=128)] = ""
    """The user, without `client.`; docs/multi-node.md has the capabilities that it needs. Empty in mode node: the
    user and the key of each volume come with the calls, as secrets."""

    key_file: AbsolutePath | Literal[""] = ""
    """The file with the user's key, or its keyring, which only its owner may read. It belongs to the controller."""

    create_pool: bool = False
    """Whether a first start makes an empty namespace crust's pool."""
