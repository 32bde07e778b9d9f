"""Lists the modules that the agent imports; the guest's own interpreter runs this while the image is built.

    closure.py <directory above agent/> <prefix of the unpacked packages> <output directory> <module>...

Imports the modules, compiles every imported Python file, and prints a JSON object that maps the path in the guest to
the file to put there. Only imported files go into the image, because a small archive boots faster. Files are compiled
without docstrings and with an unchecked hash, so that they contain neither a time nor a path of this machine.
"""

import sys

AGENT_HOME = "/crust"
# Extensions whose libraries are in no package of the guest. They are blocked: on a machine that has the library the
# interpreter would import them, and the machine's copy would go into the image.
_WITHOUT_LIBRARY = ("_bz2", "_curses", "_hashlib", "_lzma", "_ssl", "_uuid", "readline")


def main(agent_parent: str, prefix: str, output: str, *modules: str) -> None:
    """Import `modules` and print the map."""
    origins = _imported(agent_parent, modules)
    # Imported only now, so that the list does not contain the modules that compiling needs.
    import json

    files = {}
    for origin in origins:
        place = _place(origin, agent_parent, prefix)
        if origin.endswith(".py"):
            compiled = f"{output}{place}c"
            _compile(origin, compiled, place)
            files[f"{place}c"] = compiled
        else:
            files[place] = origin
    json.dump(files, sys.stdout)


def _imported(agent_parent: str, modules: tuple[str, ...]) -> list[str]:
    sys.path.insert(0, agent_parent)
    blocked: dict[str, None] = dict.fromkeys(_WITHOUT_LIBRARY)
    sys.modules.update(blocked)  # type: ignore[arg-type]  # None is how an import is refused
    for module in modules:
        __import__(module)
    loaded = (m for name, m in sys.modules.items() if name != "__main__")
    return sorted({o for m in loaded if (o := getattr(m, "__file__", None)) is not None})


def _place(origin: str, agent_parent: str, prefix: str) -> str:
    if origin.startswith(f"{prefix}/"):
        return origin.removeprefix(prefix)
    return AGENT_HOME + origin.removeprefix(agent_parent)


def _compile(source: str, compiled: str, shown_as: str) -> None:
    import os
    import py_compile

    os.makedirs(os.path.dirname(compiled), exist_ok=True)
    mode = py_compile.PycInvalidationMode.UNCHECKED_HASH
    py_compile.compile(source, compiled, shown_as, doraise=True, optimize=2, invalidation_mode=mode)


if __name__ == "__main__":
    main(*sys.argv[1:])
