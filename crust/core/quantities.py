"""Whole numbers as Kubernetes writes them: 3000, 3k, 64Ki, 10Gi."""

import re

_QUANTITY = re.compile(r"(0|[1-9][0-9]{0,14})(Ki|Mi|Gi|Ti|k|M|G|T)?")
_UNITS = {
    "": 1, "Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30, "Ti": 1 << 40,
    "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12,
}  # fmt: skip


def parse(text: str) -> int | None:
    """The number, or None if the text is not one. Sizes and rates have no fraction and no sign."""
    found = _QUANTITY.fullmatch(text)
    return int(found[1]) * _UNITS[found[2] or ""] if found else None
