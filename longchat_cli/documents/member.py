"""One file among many: whether it is wanted, worth reading, and where it stands in the order."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import PurePath

from pathspec import GitIgnoreSpec

from longchat_cli.documents import formats
from longchat_cli.documents.boilerplate import CHOICES
from longchat_cli.documents.document import Document, Skip
from longchat_cli.errors import BadInput, UsageError

_MANIFESTS = {
    "build.gradle", "build.gradle.kts", "cargo.toml", "cmakelists.txt", "composer.json", "gemfile", "go.mod",
    "makefile", "package.json", "pom.xml", "pyproject.toml", "requirements.txt", "setup.cfg", "setup.py",
}  # fmt: skip
_LOCKS = {
    "bun.lock", "cargo.lock", "composer.lock", "deno.lock", "flake.lock", "gemfile.lock", "go.sum",
    "npm-shrinkwrap.json", "package-lock.json", "packages.lock.json", "pdm.lock", "pipfile.lock",
    "pnpm-lock.yaml", "poetry.lock", "pubspec.lock", "uv.lock", "yarn.lock",
}  # fmt: skip
_PROSE = {"", ".htm", ".html", ".ipynb", ".markdown", ".md", ".pdf", ".docx", ".epub", ".rst", ".txt"}
_MINIFIABLE = {".cjs", ".css", ".js", ".mjs"}
_GENERATED = re.compile(
    r"@generated\b|\bdo not (?:edit|modify)\b.{0,80}generated|generated\b.{0,80}\bdo not (?:edit|modify)\b",
    re.IGNORECASE | re.DOTALL,
)
_TOP = 1000
"""Characters in which a generated file says so."""
_LONG_LINE = 500
"""Mean characters per line that nobody writes by hand."""


@dataclass(frozen=True)
class Options:
    """How documents are read: `boilerplate` 'drop' or 'keep'; of folders and archives the paths that match
    `include` (all when empty) and not `exclude`, patterns as in .gitignore. Raises UsageError."""

    boilerplate: str = "drop"
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.boilerplate not in CHOICES:
            raise UsageError(f"no boilerplate '{self.boilerplate}'", "", f"use {' or '.join(CHOICES)}")
        _ = self._included, self._excluded

    def leaves_out(self, path: str) -> bool:
        """`path`, relative to the folder or archive and with slashes, is not wanted."""
        wanted = not self.include or self._included.match_file(path)
        return not wanted or self._excluded.match_file(path)

    @cached_property
    def _included(self) -> GitIgnoreSpec:
        return _patterns(self.include)

    @cached_property
    def _excluded(self) -> GitIgnoreSpec:
        return _patterns(self.exclude)


def read_member(name: str, data: bytes, options: Options) -> Document | Skip:
    """A file of a folder or archive, headed by its name, or why it is left out."""
    if reason := _clutter_by_name(PurePath(name).name.lower()):
        return Skip(name, reason)
    if formats.is_archive(name, data):
        return Skip(name, "an archive, read only when named itself")
    try:
        document = formats.parse(name, data, options.boilerplate)
    except BadInput as error:
        return Skip(name, error.why)
    if reason := _clutter_by_text(PurePath(name).suffix.lower(), document.text):
        return Skip(name, reason)
    return document.headed()


def order(path: PurePath) -> tuple[tuple[int, int, str, str], ...]:
    """Sorts paths: in each folder README files, manifests, other files, then folders."""
    folders = [(1, 0, part.casefold(), part) for part in path.parts[:-1]]
    return (*folders, (0, _rank(path.name.lower()), path.name.casefold(), path.name))


def _rank(name: str) -> int:
    if name.partition(".")[0] == "readme":
        return 0
    return 1 if name in _MANIFESTS else 2


def _clutter_by_name(name: str) -> str:
    if name in _LOCKS:
        return "lock file"
    if name.endswith((".js.map", ".css.map", ".mjs.map")):
        return "source map"
    return "minified" if name.endswith((".min.js", ".min.css", ".min.mjs")) else ""


def _clutter_by_text(suffix: str, text: str) -> str:
    if suffix not in _PROSE and _GENERATED.search(text, 0, _TOP):
        return "generated, as it says itself"
    lines = text.count("\n") + 1
    if suffix in _MINIFIABLE and len(text) > 10 * _LONG_LINE and len(text) / lines > _LONG_LINE:
        return "minified"
    return ""


def _patterns(lines: Iterable[str]) -> GitIgnoreSpec:
    try:
        return GitIgnoreSpec.from_lines(lines)
    except ValueError as error:
        raise UsageError("a pattern of --include or --exclude cannot be read", str(error)) from error
