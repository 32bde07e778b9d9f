"""crust with one rule broken: the central controller does not record where a name is, and asks nobody for it.

Each create goes to the node that is the best now, which is another one while the first is cut off.
"""

from crust.cli.main import main
from crust.cluster.central.names import Names


async def _nowhere(_self: Names, _key: str) -> str:
    return ""


async def _unrecorded(_self: Names, _key: str, pool_id: str) -> str:
    return pool_id


if __name__ == "__main__":
    setattr(Names, "pool_of", _nowhere)  # noqa: B010 - a method is replaced
    setattr(Names, "record", _unrecorded)  # noqa: B010 - a method is replaced
    main()
