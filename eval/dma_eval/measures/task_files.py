"""The local files that an lm-eval task is made of. Their contents identify it."""

from __future__ import annotations

import glob
import hashlib
import importlib.util
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

FOLDER_KEYS = ("dataset_path", "data_dir")
"""Keys whose value may be a folder of data."""


def fingerprint(name: str, index: Mapping[str, Any]) -> str:
    """Return a hash of all local files of a task, a group, a tag or a YAML file.

    These are its YAML file, the files that this includes, modules with its functions and their neighbours, its data
    files, and those of all members. ``index`` is lm-eval's index of names. Data sets of the Hub have no local files.
    """
    digest = hashlib.sha256()
    for file in sorted(_files_of(name, index)):
        digest.update(file.name.encode())
        digest.update(hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()


def _files_of(name: str, index: Mapping[str, Any]) -> set[Path]:
    names, yaml_files, others = {name}, set[Path](), set[Path]()
    pending: list[str | Path] = [name]
    while pending:
        following: set[str | Path] = set()
        each = pending.pop()
        if isinstance(each, Path):
            yaml_files.add(each)
            for keys, value, is_function in _scalars(each):
                if is_function:
                    others |= _modules(value, each.parent)
                elif keys[-1] == "include":
                    following.add((each.parent / value).resolve())
                elif keys[-1] in ("task", "group") and value not in names:
                    names.add(value)
                    following.add(value)
                else:
                    others |= _data(keys, value)
        elif each in index and index[each].yaml_path is None:  # a tag
            following |= index[each].tags - names
            names |= index[each].tags
        else:
            following.add(Path(index[each].yaml_path if each in index else each).resolve())
        pending += [new for new in following if isinstance(new, str) or (new.is_file() and new not in yaml_files)]
    return yaml_files | others


def _scalars(file: Path) -> Iterator[tuple[tuple[str, ...], str, bool]]:
    """Yield keys, value, and whether it names a function, of every scalar in a YAML file; none if it is malformed."""

    def walk(node: yaml.Node, keys: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], str, bool]]:
        if isinstance(node, yaml.MappingNode):
            for key, value in node.value:
                yield from walk(value, (*keys, str(key.value)))
        elif isinstance(node, yaml.SequenceNode):
            for value in node.value:
                yield from walk(value, keys)
        elif node is not None:
            yield keys or ("",), node.value, node.tag == "!function"

    try:
        root = yaml.compose(file.read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
    except (OSError, ValueError, yaml.YAMLError):  # lm-eval says what is wrong when it loads the task
        return
    yield from walk(root, ())


def _modules(function: str, folder: Path) -> set[Path]:
    """Return the module of a function beside a YAML file, with its neighbours, which it may import; or elsewhere."""
    module = function.rpartition(".")[0]
    beside = (folder / f"{module.replace('.', '/')}.py").resolve()
    if beside.is_file():
        return set(beside.parent.glob("*.py"))
    try:
        spec = importlib.util.find_spec(module) if module else None
    except (ImportError, ValueError):
        return set()
    return {Path(spec.origin)} if spec is not None and spec.origin and os.path.isfile(spec.origin) else set()


def _data(keys: tuple[str, ...], value: str) -> set[Path]:
    """Return the files that a value names: one, those that a pattern matches, or all in a folder of data."""
    if os.path.isfile(value):  # unlike Path.is_file, it takes any text
        return {Path(value).resolve()}
    if "dataset_kwargs" in keys and glob.has_magic(value):
        return {Path(each).resolve() for each in glob.glob(value, recursive=True) if os.path.isfile(each)}
    if keys[-1] in FOLDER_KEYS and os.path.isdir(value):
        return {each.resolve() for each in Path(value).rglob("*") if each.is_file()}
    return set()
