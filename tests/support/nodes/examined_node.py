"""What the checks of `crust doctor` find on a node, and the files and answers that they look at."""

from pathlib import Path

import crust
from crust.cli.doctor import examine
from crust.cli.doctor.node import Finding, Level, Node
from crust.inspection import views
from crust.inspection.views import ProxyAnswer

DEPLOY = Path(__file__).parents[3] / "deploy"
RELEASE = "6.1.0-18-amd64"
DRIVER = views.DriverRow("block.csi.crust.dev", "/s", "/b", "ready", crust.__version__, "", 0, "")
HANDLER_ANSWER = (views.HandlerRow("kata", "1", "/h", (), (), 0, None),)  # type: ignore[arg-type]
HEALTHY = ProxyAnswer(crust.__version__, (DRIVER,), HANDLER_ANSWER, ())


def write(root: Path, path: str, text: str = "") -> Path:
    """Write a file of the node, with its directories."""
    file = root / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return file


def found(node: Node, name: str) -> tuple[Finding, ...]:
    """The findings of one check."""
    return examine.findings(node, (name,))


def bad(node: Node, name: str, level: Level) -> str:
    """The text of the first finding that is not ok; it says what, why and what to do."""
    first = next(finding for finding in found(node, name) if finding.level is not Level.OK)
    assert first.level is level
    assert first.todo
    return f"{first.what}: {first.why}; {first.todo}"
