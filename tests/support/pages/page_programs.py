"""The programs of docs/driver-author.md and docs/runtime-author.md, as the pages print them."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[3]
PAGES = {"driver-author.md": "mini_driver.py", "runtime-author.md": "box_runtime.py"}
"""By page: the file of examples/ that it prints."""


def program(page: str) -> str:
    """The page's only program."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    (code,) = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert isinstance(code, str)
    return code
