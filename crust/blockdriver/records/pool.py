"""The pool of a driver: its ids, and whether it is served now. Where it is, and how it is known, its engine says."""

from crust.blockdriver.engines.pool_store import PoolHome
from crust.core import errors
from crust.core.pool_ids import PoolIds


class Pool:
    """A pool in the `home` that its engine has for it."""

    def __init__(self, home: PoolHome) -> None:
        self.home = home
        self._problem: errors.CrustError | None = None

    @property
    def ids(self) -> PoolIds:
        """The pool's ids. Raises `PeerUnavailable` if it was never opened."""
        return self.home.ids

    @property
    def is_served(self) -> bool:
        """Whether calls that need it are served."""
        return self._problem is None

    def check_served(self) -> None:
        """Raise why the pool is not served, if it is not."""
        if self._problem is not None:
            raise self._problem

    def refuse(self, problem: errors.CrustError) -> None:
        """Have `problem` as the answer to whoever needs the pool, until `serve`."""
        self._problem = problem

    def serve(self) -> None:
        """Serve whoever needs the pool: all that is kept in it was read."""
        self._problem = None
