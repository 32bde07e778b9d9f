"""The table of CSI's MUSTs has each line of CSI's own text that demands something."""

import json
import subprocess
from collections import Counter
from pathlib import Path

from tests.support import capabilities
from tests.support.pages import csi_musts

ROOT = Path(__file__).parents[3]
MODULE = "github.com/container-storage-interface/spec"


def _text() -> str:
    """The specification, in the module that examples/go is built with."""
    find_go = [ROOT / "tests" / "find_go.sh", ROOT / ".cache" / "go"]
    go = subprocess.run(find_go, check=True, capture_output=True, text=True).stdout.strip()
    download = [go, "mod", "download", "-json", MODULE]
    answer = subprocess.run(
        download, check=True, capture_output=True, text=True, cwd=ROOT / "examples" / "go"
    )
    module = json.loads(answer.stdout)
    assert module["Version"] in csi_musts.PAGE.read_text(encoding="utf-8"), "the page's version"
    return Path(module["Dir"], "spec.md").read_text(encoding="utf-8")


def test_each_must_of_the_text_stands_in_one_row() -> None:
    capabilities.need("go-driver")
    demanding = {
        number
        for number, line in enumerate(_text().splitlines(), 1)
        if csi_musts.DEMANDS.search(line)
    }
    listed = Counter(line for row in csi_musts.rows() for line in row.lines)
    assert [line for line, times in listed.items() if times > 1] == []
    assert set(listed) == demanding
