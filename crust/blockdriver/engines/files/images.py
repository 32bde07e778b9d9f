"""The image files of a pool, one per volume: their names, and how large they are.

The only place that turns a volume's id into a path: an id that could name another file is refused.
"""

from collections.abc import Callable

from crust.blockdriver.engines.protocol import ImageMissing
from crust.core import errors, volumes
from crust.host.files import sparse
from crust.host.files.held_directory import Place

_SUFFIX = ".img"


class Images:
    """The images in one directory. `is_id`: whether a text is the id of a volume of this pool."""

    def __init__(self, directory: Place, is_id: Callable[[str], bool]) -> None:
        self.directory = directory
        self._is_id = is_id

    def path(self, volume_id: volumes.VolumeId) -> Place:
        """The image of a volume, whether it exists or not."""
        if not volume_id.replace("-", "").isalnum() or not volume_id.isascii():
            raise errors.InvalidRequest(f"{volume_id!r} cannot be the name of an image")
        return self.directory / (volume_id + _SUFFIX)

    def is_name(self, name: str) -> bool:
        """Whether a file of this name can be an image of this pool."""
        return name.endswith(_SUFFIX) and self._is_id(name.removesuffix(_SUFFIX))

    def ids(self) -> frozenset[volumes.VolumeId]:
        """The volumes that have an image."""
        return frozenset(volumes.VolumeId(name) for name in sparse.names(self.directory, _SUFFIX))

    def size_bytes(self, volume_id: volumes.VolumeId) -> int:
        """The file's apparent size; raises `ImageMissing`."""
        try:
            return sparse.size_bytes(self.path(volume_id))
        except errors.NotFound as err:
            raise ImageMissing(volume_id) from err
