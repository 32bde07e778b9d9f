"""Generates crust/wire from the protos, the JSON schema from the record's model, and the test vectors.

`--into DIR` writes there, in the places that the checkout has. `--check` generates aside and compares with what is
committed; exit code 1 names every file that differs.
"""

import argparse
import filecmp
import importlib
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import click

ROOT = Path(__file__).resolve().parent.parent
PROTO = ROOT / "specs" / "proto"
SCHEMA = Path("specs/mountInfo.schema.json")
MAN = Path("docs/man")
CONFORMANCE_MAN = Path("conformance/man")
"""The pages of the conformance suites, which a node does not get."""


def generate(into: Path) -> list[Path]:
    """Write everything below `into`; returns the files, relative to it."""
    sources = sorted(str(path.relative_to(PROTO)) for path in PROTO.rglob("*.proto"))
    outputs = ("python_out", "grpc_python_out", "mypy_out", "mypy_grpc_out")
    plugins = ("protoc-gen-mypy", "protoc-gen-mypy_grpc")
    programs = Path(sys.executable).parent
    subprocess.run(
        [
            sys.executable,
            "-m",
            "grpc_tools.protoc",
            f"--proto_path={PROTO}",
            *(f"--plugin={name}={programs / name}" for name in plugins),
            *(f"--{output}={into}" for output in outputs),
            *sources,
        ],
        check=True,
        cwd=ROOT,
        stderr=subprocess.DEVNULL,
    )
    made = sorted(path for path in (into / "crust" / "wire").rglob("*_pb2*.py*") if path.is_file())
    made = [path for path in made if "__pycache__" not in path.parts]
    for path in made:
        _into_own_pool(path)
    schema = into / SCHEMA
    schema.parent.mkdir(parents=True, exist_ok=True)
    schema.write_text(importlib.import_module("make_schema").json_schema())
    vectors = importlib.import_module("make_vectors")
    found = (*made, schema, *man_pages(into))
    return [*(path.relative_to(into) for path in found), *vectors.write(into)]


def man_pages(into: Path) -> list[Path]:
    """Write a man page per command, which changes with the command alone: without date and version. Returns them."""
    from crust.cli.main import main as crust_command
    from crust_conformance.command import main as conformance_command

    pages = _man_pages(into / MAN, "crust", crust_command)
    return pages + _man_pages(into / CONFORMANCE_MAN, "crust-conformance", conformance_command)


def _man_pages(into: Path, name: str, command: click.Command) -> list[Path]:
    import click_man.core

    into.mkdir(parents=True, exist_ok=True)
    _name_whole(command)
    click_man.core.write_man_pages(name, command, version="", target_dir=str(into), date="crust")
    pages = sorted(into.glob("*.1"))
    for page in pages:  # click marks a paragraph that is not to be filled with a backspace
        text = page.read_text(encoding="utf-8").replace("\b\n", ".br\n")
        title = f'.TH "{page.stem.upper()}"'
        page.write_text(re.sub(r'^\.TH "[^"]*"', title, text), encoding="utf-8")
    return pages


def _name_whole(command: click.Command) -> None:
    """The line NAME, which apropos searches, has the whole first sentence: click would cut it."""
    paragraph = (command.help or "").partition("\n\n")[0]
    command.short_help = " ".join(paragraph.split()).partition(". ")[0]
    context = click.Context(
        command
    )  # click_man does not ask for the flags that are made from settings
    command.params = [each for each in command.get_params(context) if "--help" not in each.opts]
    for below in command.commands.values() if isinstance(command, click.Group) else ():
        _name_whole(below)


def _into_own_pool(module: Path) -> None:
    """Define a module's messages in the pool of `crust/wire/pool.py`: protoc knows the default pool only."""
    if not module.name.endswith("_pb2.py"):
        return
    text = module.read_text()
    text = text.replace(
        "from google.protobuf import descriptor_pool as _descriptor_pool\n",
        "from crust.wire import pool as _pool\n",
    )
    module.write_text(text.replace("_descriptor_pool.Default().", "_pool.POOL."))


def differing() -> list[Path]:
    """Files whose committed content is not what would be generated, missing and surplus ones included."""
    with tempfile.TemporaryDirectory() as directory:
        into = Path(directory)
        made = generate(into)
        stale = [path for path in made if not _same(into / path, ROOT / path)]
    committed = (ROOT / "crust" / "wire").rglob("*_pb2*.py*")
    present = {path.relative_to(ROOT) for path in committed if "__pycache__" not in path.parts}
    present |= {path.relative_to(ROOT) for path in (ROOT / MAN).glob("*.1")}
    present |= {path.relative_to(ROOT) for path in (ROOT / CONFORMANCE_MAN).glob("*.1")}
    return stale + sorted(present - set(made))


def _same(one: Path, other: Path) -> bool:
    return other.exists() and filecmp.cmp(one, other, shallow=False)


def main() -> int:
    """Run the command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--into", type=Path)
    what.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    if not arguments.check:
        generate(arguments.into.resolve())
        return 0
    stale = differing()
    for path in stale:
        sys.stderr.write(f"{path} is not what its source generates; run `make proto`\n")
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
