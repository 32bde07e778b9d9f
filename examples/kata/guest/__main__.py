"""`python -m examples.kata.guest build [--cache DIR] [--flavour cloud|standard]`: prints the image's directory."""

import argparse
import sys
from pathlib import Path

from crust.core import errors
from examples.kata.guest import image


def main() -> int:
    """Build the guest image; a failure is one sentence and exit code 1."""
    parser = argparse.ArgumentParser(prog="python -m examples.kata.guest", description=__doc__)
    parser.add_argument("action", choices=["build"])
    parser.add_argument("--cache", type=Path, default=Path(".cache/guest"))
    parser.add_argument("--flavour", choices=["cloud", "standard"], default="cloud")
    args = parser.parse_args()
    try:
        built = image.build(args.cache, args.flavour)
    except errors.CrustError as err:
        print(f"error: {err}", file=sys.stderr)  # noqa: T201
        return 1
    print(built.directory)  # noqa: T201
    return 0


if __name__ == "__main__":
    sys.exit(main())
