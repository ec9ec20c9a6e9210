"""Jupyter notebooks: the source of each cell and what it printed, placed by cell number."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from longchat_cli.documents.builder import Builder
from longchat_cli.documents.document import Document
from longchat_cli.documents.text import clean, decoded, require_text
from longchat_cli.errors import BadInput


def parse(name: str, data: bytes) -> Document:
    """A notebook's bytes (format 3 and 4) to a Document. Raises BadInput."""
    source = decoded(name, data)
    try:
        cells = list(_cells(json.loads(source.text)))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise BadInput(f"{name} cannot be read", "not a notebook, or damaged") from error
    builder = Builder()
    for place, text in cells:
        builder.separate("\n\n")
        builder.verbatim(clean(text)[0].strip("\n"), 1, place)
    return require_text(replace(source, text=builder.text, marks=tuple(builder.marks)))


def _cells(notebook: Any) -> Iterator[tuple[str, str]]:
    """(place, text) of every source and textual output."""
    sheets = [notebook] if "cells" in notebook else notebook["worksheets"]
    cells = [cell for sheet in sheets for cell in sheet["cells"]]
    for number, cell in enumerate(cells, 1):
        yield f"cell {number}", _joined(cell["source"] if "source" in cell else cell["input"])
        for output in cell.get("outputs", []):
            yield f"output of cell {number}", _printed(output)


def _printed(output: Any) -> str:
    if "traceback" in output:
        return "\n".join(output["traceback"])
    plain = output.get("data", {}).get("text/plain", "")
    return _joined(output.get("text", plain))


def _joined(lines: Any) -> str:
    if not isinstance(lines, str):
        lines = "".join(lines)
    return lines
