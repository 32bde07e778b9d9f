"""Print the lowest versions that pyproject.toml allows, as requirements for pip."""

import re
import sys
import tomllib
from pathlib import Path

project = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))["project"]
extras = project["optional-dependencies"].values()
for requirement in (*project["dependencies"], *(each for extra in extras for each in extra)):
    bounds = re.match(r"([\w.-]+)>=([\w.]+)", requirement)
    if bounds is None:
        sys.exit(f"error: {requirement} has no lowest version: write it as name>=version,<version")
    sys.stdout.write(f"{bounds[1]}=={bounds[2]}\n")
