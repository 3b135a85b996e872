"""Hooks of MkDocs: pages that lie outside ``docs``, links between them, and generated parts of the reference."""

from __future__ import annotations

import posixpath
import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / folder) for folder in (".", "kernels", "eval", "scripts", "benchmarks")]

import docs_reference  # noqa: E402 (needs the paths)

FOLDER = "benchmarks"
"""This folder of the repository is part of the site as it is: pages, plots and result files. Scripts are not."""
MOVED = {"CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
"""Files at the root of the repository that are pages of the site, and their place on it."""
INDEXES = ("README.md", "report.md")
"""What a link to a folder shows."""
LINK = re.compile(r"(?<=\]\()(?![a-z]+:)([^)#\s]+)(?=[)#])")
ROLE = re.compile(r":\w+:(?=<code>)")
"""A role of Sphinx in a docstring, before its text."""
MARK = re.compile(r"^<!-- generate: (\w+) -->$", re.MULTILINE)


def on_files(files: Files, config: Any) -> Files:
    """Add the pages and files outside ``docs``."""
    for path in sorted((ROOT / FOLDER).rglob("*")):
        if path.is_file() and path.suffix not in (".py", ".pyc"):
            name = path.relative_to(ROOT).as_posix()
            files.append(File(name, str(ROOT), config.site_dir, config.use_directory_urls))
    for name, place in MOVED.items():
        files.append(File.generated(config, place, content=(ROOT / name).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Write the generated parts, and turn links between files of the repository into links of the site.

    Raises:
        PluginError: A link leads to a file that is not on the site, or a mark names no generator.
    """
    place = page.file.src_uri
    own = place if place.startswith(f"{FOLDER}/") else f"docs/{place}"
    source = next((name for name, moved in MOVED.items() if moved == place), own)

    def link(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source), match[1]))
        if (ROOT / target).is_dir():
            target = next((f"{target}/{name}" for name in INDEXES if (ROOT / target / name).exists()), target)
        if target in (*MOVED, "README.md"):
            target = MOVED.get(target, "index.md")
        elif target.startswith("docs/"):
            target = target.removeprefix("docs/")
        elif not target.startswith(f"{FOLDER}/"):
            raise PluginError(f"{source}: {match[1]} is not on the site; name the file without a link")
        return posixpath.relpath(target, posixpath.dirname(place) or ".")

    def generate(match: re.Match[str]) -> str:
        if match[1] not in docs_reference.GENERATORS:
            raise PluginError(f"{source}: no generator {match[1]!r}; valid: {', '.join(docs_reference.GENERATORS)}")
        return docs_reference.GENERATORS[match[1]]()

    return MARK.sub(generate, LINK.sub(link, markdown))


def on_page_content(html: str, **_: Any) -> str:
    """Turn what docstrings have of reStructuredText, roles and literal blocks, into plain text."""
    return re.sub(r"(?<=<code>)~(?:\w+\.)*", "", ROLE.sub("", html)).replace("::</p>", ":</p>")
