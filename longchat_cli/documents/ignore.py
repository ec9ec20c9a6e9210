"""Git's ignore rules: nested .gitignore files, those of the enclosing repository, .git/info/exclude.

.longchatignore files are read as well, by the same rules, and decide over the .gitignore beside them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from pathspec.patterns.gitignore.spec import GitIgnoreSpecPattern as Pattern

NAMES = (".gitignore", ".longchatignore")


@dataclass(frozen=True)
class Rules:
    """The patterns of one ignore file, which hold below `base`."""

    base: Path
    patterns: list[Pattern]

    def verdict(self, path: Path, is_dir: bool) -> bool | None:
        """True ignored, False re-included (`!pattern`), None no pattern matches `path` itself.

        pathspec's own check also matches what lies below a match, which for `!folder` is not git's rule;
        the walk goes down level by level, so a match of each level itself is all that is needed.
        """
        relative = path.relative_to(self.base).as_posix() + "/" * is_dir
        matching = (each for each in reversed(self.patterns) if _matches(each, relative))
        return next((each.include for each in matching), None)


def ignored(path: Path, is_dir: bool, rules: tuple[Rules, ...]) -> bool:
    """Git's order: the deepest ignore file that says anything decides. `rules` go from the root down."""
    verdicts = (each.verdict(path, is_dir) for each in reversed(rules))
    return next((verdict for verdict in verdicts if verdict is not None), False)


def rules_in(directory: Path) -> tuple[Rules, ...]:
    """The rules of `directory`'s own ignore files, the last the strongest (linked ones do not count)."""
    return tuple(rules for name in NAMES for rules in _load(directory / name, directory))


def rules_above(directory: Path) -> tuple[Rules, ...]:
    """The rules that an enclosing git repository holds for `directory`, none if it has been named on
    purpose although they ignore it."""
    repository = next((p for p in (directory, *directory.parents) if os.path.lexists(p / ".git")), None)
    if repository is None:
        return ()
    rules = tuple(_load(repository / ".git" / "info" / "exclude", repository))
    chain = [p for p in (*reversed(directory.parents), directory) if p.is_relative_to(repository)]
    for parent, child in pairwise(chain):
        rules += rules_in(parent)
        if ignored(child, True, rules):
            return ()
    return rules


def _load(file: Path, base: Path) -> Iterator[Rules]:
    try:
        if file.is_symlink() or not file.is_file():
            return
        lines = file.read_bytes().decode("utf-8-sig", "replace").splitlines()
    except OSError:
        return
    yield Rules(base, [pattern for line in lines for pattern in _patterns(line)])


def _matches(pattern: Pattern, relative: str) -> bool:
    if pattern.regex is None:
        return False
    if not pattern.regex.groupindex:  # pathspec's short form of `*`, which matches all
        return pattern.regex.search(relative) is not None
    return any(match.end() == len(relative) for match in pattern.regex.finditer(relative))


def _patterns(line: str) -> list[Pattern]:
    line = re.sub(r"/\*\*\s*$", "/**/*", line)  # all below a folder, not the folder itself
    try:
        pattern = Pattern(line)
    except ValueError:  # git passes over a pattern it cannot read
        return []
    return [] if pattern.include is None else [pattern]
