"""Which key holds what. A node reads and writes below its own directory alone, and needs nothing else.

| key below the prefix | written by | lives | holds |
|---|---|---|---|
| `decommissioned/POOL` | an operator's command | for good | the node that had the pool |
| `leader` | controllers | with the leader's lease | who leads; its create revision is the term |
| `nodes/NODE/announce` | the node | with the node's lease | the announcement |
| `nodes/NODE/pools/POOL` | the node | until the node is retired | nothing; its revision says who had it last |
| `nodes/NODE/requests/ID` | the leader, deleted by the node with its answer | while it is of use | a request |
| `nodes/NODE/answers/ID` | the node, deleted by the leader | until it was read | an answer |
| `placements/NAME` | the leader | until the volume is deleted | the pool in which the volume of this name is |

A controller follows all but the last, which are one range: a watch has one order of events. Names are quoted as in a
URL, so that none has a slash.
"""

from dataclasses import dataclass
from urllib.parse import quote, unquote

from crust.cluster.etcd.client.writes import after_prefix

ANNOUNCE = "announce"
POOL = "pools"
REQUEST = "requests"
ANSWER = "answers"


@dataclass(frozen=True, slots=True)
class Key:
    """A key taken apart: `leader` has nothing more, a pool or a node its name; a node's key a kind, and mostly
    an id.
    """

    directory: str
    name: str = ""
    kind: str = ""
    id: str = ""


@dataclass(frozen=True, slots=True)
class Keys:
    """The keys below a prefix, which ends with a slash."""

    prefix: str

    @property
    def leader(self) -> bytes:
        """Who leads."""
        return self._key("leader")

    def announce(self, node_id: str) -> bytes:
        """A node's announcement."""
        return self._key("nodes", node_id, ANNOUNCE)

    def request(self, node_id: str, request_id: str) -> bytes:
        """A request to a node."""
        return self._key("nodes", node_id, REQUEST, request_id)

    def answer(self, node_id: str, request_id: str) -> bytes:
        """A node's answer."""
        return self._key("nodes", node_id, ANSWER, request_id)

    def pool(self, node_id: str, pool_id: str) -> bytes:
        """That a node has, or had, a pool."""
        return self._key("nodes", node_id, POOL, pool_id)

    def decommissioned(self, pool_id: str) -> bytes:
        """That a pool is retired."""
        return self._key("decommissioned", pool_id)

    def placement(self, name: str) -> bytes:
        """The pool of a name."""
        return self._key("placements", name)

    def node(self, node_id: str) -> tuple[bytes, bytes]:
        """The range of all that is of a node, which is also the range that its role is granted."""
        return _range(self._key("nodes", node_id, ""))

    def nodes(self) -> tuple[bytes, bytes]:
        """The range of all that is of nodes."""
        return _range(self._key("nodes", ""))

    def requests(self, node_id: str) -> tuple[bytes, bytes]:
        """The range of the requests to a node."""
        return _range(self._key("nodes", node_id, REQUEST, ""))

    def pools(self, node_id: str) -> tuple[bytes, bytes]:
        """The range of a node's pools."""
        return _range(self._key("nodes", node_id, POOL, ""))

    def placements(self, beginning: str = "") -> tuple[bytes, bytes]:
        """The range of all placements, or of those whose name has this beginning."""
        return _range(self._key("placements", beginning))

    def followed(self) -> tuple[bytes, bytes]:
        """The range that a controller follows."""
        return self._key("decommissioned", ""), self._key("placements", "")

    def parse(self, key: bytes) -> Key | None:
        """Take a key apart; None if it is none of ours."""
        try:
            path = key.decode("ascii").removeprefix(self.prefix)
        except UnicodeDecodeError:
            return None
        match [unquote(part) for part in path.split("/")]:
            case ["leader"]:
                return Key("leader")
            case ["decommissioned" | "placements" as directory, name]:
                return Key(directory, name)
            case ["nodes", name, "announce"]:
                return Key("nodes", name, ANNOUNCE)
            case ["nodes", name, "requests" | "answers" | "pools" as kind, each]:
                return Key("nodes", name, kind, each)
        return None

    def _key(self, *parts: str) -> bytes:
        return (self.prefix + "/".join(quote(part, safe="") for part in parts)).encode()


def _range(prefix: bytes) -> tuple[bytes, bytes]:
    return prefix, after_prefix(prefix)
