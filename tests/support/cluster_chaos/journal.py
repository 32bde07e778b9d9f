"""What the CO asked for and what was answered, a JSON object per line, in the order of the events.

A line is on its way to the file before the call that it announces is sent, and an answer is written after it came. So
for the checker a name is settled if its last line is an answer.
"""

import json
import time
from pathlib import Path


class Journal:
    """Appends lines to a file; one process has one of its own."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", encoding="utf-8", buffering=1)

    def write(self, event: str, **values: object) -> None:
        """Append an event."""
        self._file.write(json.dumps({"event": event, "time": time.time(), **values}) + "\n")

    def close(self) -> None:
        """Close the file."""
        self._file.close()
