"""What `kubectl kustomize` renders of deploy/kubernetes, without kubectl.

The directories stay the one source of the objects. Of kustomize this knows what they use: bases, resources, a
namespace, ConfigMaps from files with a hash in their name, also in place of a base's, strategic merges, in which
lists of named things are merged by name, and patches that give all objects of one name another one. Any other key is
refused: a key that is left out silently would make objects that differ from what `kubectl apply -k` makes.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from crust import errors

Object = dict[str, Any]
_KEYS = frozenset(
    {
        "apiVersion",
        "kind",
        "namespace",
        "bases",
        "resources",
        "configMapGenerator",
        "patchesStrategicMerge",
        "patches",
    }
)
_MERGE_KEYS = ("mountPath", "name")
"""By which the items of a list are one and the same, in pods."""
_HASH_LETTERS = str.maketrans("013ae", "ghkmt")
"""Kustomize writes a hash without the characters from which words are made."""


class UnknownKustomization(errors.Unsupported):
    """A kustomization.yaml has what this program does not render."""

    def __init__(self, path: Path, why: str) -> None:
        super().__init__(
            f"{path} cannot be rendered",
            why=why,
            hint="render the directory with kubectl kustomize",
        )


def render(directories: Sequence[Path], files: Mapping[str, str]) -> list[Object]:
    """The objects of directories with a kustomization.yaml, as if one had all of them; a base that they share is in
    it once. `files` replace files of ConfigMaps, by name. Raises `UnknownKustomization`.
    """
    rendering = _Rendering(files)
    for each in directories:
        rendering.add(each.resolve())
    for found in rendering.objects:
        _rename(found, rendering.config_maps)
    return rendering.objects


class _Rendering:
    """The objects so far, and the names that ConfigMaps got."""

    def __init__(self, files: Mapping[str, str]) -> None:
        self.objects: list[Object] = []
        self.config_maps: dict[str, str] = {}
        self._files = files
        self._added: set[Path] = set()

    def add(self, directory: Path) -> None:
        """Add what a directory has, unless it has been added."""
        if directory in self._added:
            return
        self._added.add(directory)
        path = directory / "kustomization.yaml"
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
        if unknown := sorted(set(found) - _KEYS):
            raise UnknownKustomization(path, f"unknown keys: {', '.join(unknown)}")
        for base in found.get("bases", ()):
            self.add((directory / base).resolve())
        for name in found.get("resources", ()):
            self.objects.extend(_read(directory / name))
        for generator in found.get("configMapGenerator", ()):
            config_map = _config_map(generator, directory, self._files, found["namespace"])
            self._add_config_map(generator, config_map)
        self._change(found, path)

    def _change(self, found: Mapping[str, Any], path: Path) -> None:
        for name in found.get("patchesStrategicMerge", ()):
            for patch in _read(path.parent / name):
                _patch(self.objects, patch, path)
        for rename in found.get("patches", ()):
            self._rename(*_names(rename, path))

    def _rename(self, before: str, after: str) -> None:
        """Name objects otherwise, and what refers to them."""
        names = {before: after}
        if before in self.config_maps:
            made = self.config_maps[before]
            names[made] = self.config_maps[before] = after + made[len(before) :]
        for each in self.objects:
            _refer(each, names)

    def _add_config_map(self, generator: Mapping[str, Any], config_map: Object) -> None:
        name = generator["name"]
        if generator.get("behavior") == "replace":
            before = self.config_maps[name]
            self.objects = [each for each in self.objects if each["metadata"]["name"] != before]
        self.config_maps[name] = config_map["metadata"]["name"]
        self.objects.append(config_map)


def _read(path: Path) -> Iterator[Object]:
    yield from yaml.safe_load_all(path.read_text(encoding="utf-8"))


def _config_map(
    generator: Mapping[str, Any], directory: Path, files: Mapping[str, str], namespace: str
) -> Object:
    data = {
        name: files.get(name) or (directory / name).read_text(encoding="utf-8")
        for name in generator["files"]
    }
    name = f"{generator['name']}-{_hash(data)}"
    metadata = {"name": name, "namespace": namespace}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": data}


def _hash(data: Mapping[str, str]) -> str:
    """As kustomize: pods are replaced when the content changes, and not when it does not."""
    content = {"data": data, "kind": "ConfigMap", "name": ""}
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return hashlib.sha256(text.encode()).hexdigest()[:10].translate(_HASH_LETTERS)


def _patch(objects: list[Object], patch: Object, path: Path) -> None:
    target = next((each for each in objects if _identity(each) == _identity(patch)), None)
    if target is None:
        raise UnknownKustomization(path, f"there is no {_identity(patch)} to change")
    _merge(target, patch)


def _names(patch: Mapping[str, Any], path: Path) -> tuple[str, str]:
    """The two names of a patch that renames. Raises `UnknownKustomization` for any other."""
    match patch:
        case {"target": {"name": before, **of}, "patch": text, **more} if not (of or more):
            match yaml.safe_load(text):
                case [{"op": "replace", "path": "/metadata/name", "value": after}]:
                    return before, after
    raise UnknownKustomization(
        path, "a patch does more than give all objects of a name another one"
    )


def _refer(found: Object, names: Mapping[str, str]) -> None:
    """Replace names where an object has its own, and those of a ServiceAccount or a role; labels stay as they are."""
    pod = found.get("spec", {}).get("template", {}).get("spec", {})
    holders = [found["metadata"], found.get("roleRef", {}), *found.get("subjects", ())]
    for holder, key in [*((each, "name") for each in holders), (pod, "serviceAccountName")]:
        if holder.get(key) in names:
            holder[key] = names[holder[key]]


def _identity(of: Object) -> tuple[str, str, str]:
    metadata = of["metadata"]
    return of["kind"], metadata.get("namespace", ""), metadata["name"]


def _merge(into: Object, patch: Mapping[str, Any]) -> None:
    for key, value in patch.items():
        if value is None:
            into.pop(key, None)
        elif isinstance(value, dict) and isinstance(into.get(key), dict):
            _merge(into[key], value)
        elif _is_of_named(value) and isinstance(into.get(key), list):
            _merge_list(into[key], value)
        else:
            into[key] = value


def _is_of_named(value: object) -> bool:
    return isinstance(value, list) and all(_name_of(each) for each in value)


def _name_of(item: object) -> str:
    if not isinstance(item, dict):
        return ""
    return next((str(item[key]) for key in _MERGE_KEYS if key in item), "")


def _merge_list(into: list[Any], patch: list[Any]) -> None:
    for each in patch:
        present = next((item for item in into if _name_of(item) == _name_of(each)), None)
        if "$patch" in each:
            into.remove(present)
        elif present is None:
            into.append(each)
        else:
            _merge(present, each)


def _rename(of: Any, made: Mapping[str, str]) -> None:
    """Volumes name their ConfigMap with its hash."""
    if isinstance(of, dict):
        config_map = of.get("configMap")
        if isinstance(config_map, dict) and config_map.get("name") in made:
            config_map["name"] = made[config_map["name"]]
        for each in of.values():
            _rename(each, made)
    elif isinstance(of, list):
        for each in of:
            _rename(each, made)
