"""The content record of a volume: one JSON object per volume, beside the volume record.

The controller part writes it once, before it answers CreateVolume: "new" for zeros, or the state of the content
source. From the first stage on, only the node part that has the volume staged writes it.

`state` only moves forward: a volume is formatted by this driver while it is "new" and at no other time.

    new ──stage for a filesystem──> formatting ──mkfs ended──> formatted
     └────────────stage as a raw device────────────────────────> raw <──┘

"formatting" means that mkfs was started with the UUID of the record, and that no user had the device when that was
written. A record can be older than the bytes, restored from a backup: so a complete filesystem of that UUID counts as
formatted, and is kept (`format_decision`).
"""

from typing import Annotated, Literal

import pydantic

from crust import errors
from crust.blockdriver.records import stored_record
from crust.blockdriver.records.stored_record import StoredRecord

ContentState = Literal["new", "formatting", "formatted", "raw"]


class UnreadableContentRecord(errors.Corrupt):
    """A content record cannot be read."""

    def __init__(self, path: str, why: str) -> None:
        super().__init__(
            f"the content record {path} cannot be read",
            why=why,
            hint="restore it from a backup, or check the volume's image by hand; nothing was changed",
        )
        self.path = path


class NewerContentRecord(errors.Corrupt):
    """A content record of a later version of the driver."""

    def __init__(self, path: str, found: int) -> None:
        super().__init__(
            f"the content record {path} has schema {found}",
            why=f"this version of the driver knows schemas up to {stored_record.SCHEMA}",
            hint="run the version that wrote it, or a later one",
        )
        self.path = path
        self.found = found


class ContentRecord(StoredRecord):
    """The content of a volume. Sizes are bytes."""

    UNREADABLE = UnreadableContentRecord
    NEWER = NewerContentRecord

    volume_id: str
    revision: Annotated[int, pydantic.Field(ge=0)] = 0
    """+1 with each write; 0 was never written. A write after a read at another revision is refused."""
    state: ContentState = "new"
    fs_type: str = ""
    """The filesystem that was made, or is being made; empty otherwise."""
    planned_uuid: str = ""
    """The UUID of the filesystem that is being made; empty otherwise."""
    filled_bytes: int = 0
    """The device size that the filesystem was last made or grown for; growth is due if the device is larger."""
    growth_refused: str = ""
    """Why the filesystem is smaller than its device, as a sentence; empty if it is not, or a guest is to grow it."""
    generation: int = 0
    """+1 whenever the content is replaced other than by its users' writes."""
    in_guest: bool = False
    """Whether a guest could ever write the content, which then needs consent to be mounted on this host."""
