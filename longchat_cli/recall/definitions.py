"""Definitions in source code: a question that names a function or class is about the place that defines it.

Words and meaning rank the many uses of a name as high as its definition; its syntax tells them apart.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

LONGEST = 3000
"""Characters of a definition at most."""

_MODIFIERS = (
    r"(?:(?:export|default|public|private|protected|internal|static|final|abstract|async|pub(?:\([^)\n]*\))?"
    r"|unsafe|inline|const|open|override|virtual|sealed|data|partial)\s+)*"
)
_KEYWORDS = (
    r"(?:def|defp|defmodule|class|function\*?|fn|fun|func(?:\s*\([^)\n]*\))?|struct|enum|union|trait|interface"
    r"|type|module|mod|namespace|record|protocol|object|macro_rules!|sub|proc)"
)
_FOLLOWED = r"(?=\s*(?:[(<\[:{=;!]|$)|\s+(?:extends|implements|struct|interface|enum|do)\b)"
_DEFINES = re.compile(rf"{_MODIFIERS}{_KEYWORDS}\s+([A-Za-z_$][\w$]*){_FOLLOWED}|#\s*define\s+(\w+)")
"""Followed by code: prose may begin with `type` or `class`."""
_ASSIGNS = re.compile(
    r"(?:(?:export|const|let|var|final|static|val)\s+)*([A-Za-z_$][\w$]*)\s*(?::[^=\n]{1,80})?=(?!=)"
)
_NAME = re.compile(r"[A-Za-z_$][\w$]*")
_CODE_NAME = re.compile(r"\w*(?:_\w|[a-z0-9][A-Z]|\d)\w*|_\w+")
_ABOUT_CODE = re.compile(
    r"\b(?:defin\w+|functions?|methods?|class(?:es)?|returns?|implement\w*|signatures?|arguments?|parameters?"
    r"|constants?|variables?|raises?|throws?|called|calls|source|code|declar\w+|\w+\(\))",
    re.IGNORECASE,
)


class Definitions:
    """Scores lines of code by whether they define a name of the question: 1, or 0.5 if they assign it."""

    def __init__(self, sentences: Sequence[str]) -> None:
        self._size = len(sentences)
        self._places: dict[str, list[tuple[int, float]]] = {}
        for number, sentence in enumerate(sentences):
            for pattern, weight in ((_DEFINES, 1.0), (_ASSIGNS, 0.5)):
                if found := pattern.match(sentence):
                    self._places.setdefault(found[found.lastindex or 1], []).append((number, weight))
                    break

    def score(self, question: str) -> np.ndarray:
        """Float32 [sentences]. A name that is a word of English too counts in questions about code alone."""
        scores = np.zeros(self._size, dtype=np.float32)
        about_code = bool(_ABOUT_CODE.search(question))
        for name in set(_NAME.findall(question)):
            if about_code or _CODE_NAME.fullmatch(name):
                for number, weight in self._places.get(name, ()):
                    scores[number] = max(scores[number], weight)
        return scores


def definition_range(text: str, begin: int) -> tuple[int, int]:
    """The characters of the definition whose name stands in the line of `begin`, with its body.

    The body ends before the first line that is indented no deeper, closing brackets apart; where it is in
    braces, with the line that closes them. At most `LONGEST` characters, whole lines.
    """
    start = text.rfind("\n", 0, begin) + 1
    depth = _indent(text[start:begin] + text[begin : begin + 1])
    end = stop = _line_end(text, begin)
    while stop < len(text):
        line_begin, stop = stop + 1, _line_end(text, stop + 1)
        line = text[line_begin:stop]
        if stop - start > LONGEST:
            break
        if not line.strip():
            continue
        closing = line.lstrip()[0] in ")]}"
        if _indent(line) <= depth and not closing:
            break
        end = stop
        if closing and _indent(line) <= depth and line.lstrip()[0] == "}":
            break
    return begin, end


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def _line_end(text: str, begin: int) -> int:
    end = text.find("\n", begin)
    return len(text) if end < 0 else end
