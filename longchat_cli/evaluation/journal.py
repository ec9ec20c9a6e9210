"""Measurements kept as they come, a JSON line each, so that a long run can be stopped and gone on with."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from longchat_cli.errors import BadInput, CannotCreate, UsageError

Row = dict[str, Any]


class Journal:
    """Rows in memory, and in a file when there is a `path`. Its first line says what all of them share.

    Raises UsageError when the file is of other settings than `about`, BadInput when it is no such file,
    CannotCreate.
    """

    def __init__(self, path: Path | None, about: Row) -> None:
        self._path = path
        self.rows: list[Row] = []
        if path is None:
            return
        lines = self._lines(about)
        if lines and lines[0] != about:
            differing = [name for name in about if lines[0].get(name) != about[name]]
            why = f"it differs in {', '.join(differing)}"
            raise UsageError(f"{path} holds other measurements", why, "name another --output")
        self.rows = lines[1:]
        # Written anew: an interrupted run may have left half a line.
        self._write("w", [about, *self.rows])

    def add(self, row: Row) -> None:
        self.rows.append(row)
        if self._path:
            self._write("a", [row])

    def where(self, **wanted: Any) -> list[Row]:
        """The rows that have all of these values."""
        return [row for row in self.rows if all(row.get(name) == value for name, value in wanted.items())]

    def _lines(self, about: Row) -> list[Row]:
        assert self._path is not None
        if not self._path.exists():
            return []
        if not self._path.is_file():  # reading a device may never end
            raise CannotCreate(f"cannot use {self._path}", "it is no regular file")
        text = self._guarded(lambda path: path.read_text(encoding="utf-8"))
        *whole, rest = text.split("\n")  # what no newline ends is half a row
        try:
            rows = [json.loads(line) for line in whole]
        except ValueError as error:
            raise BadInput(f"{self._path} is no file of measurements", str(error)) from error
        # Half a first row must be ours as well: the file will be written over.
        if not all(isinstance(row, dict) for row in rows) or not (rows or _line(about).startswith(rest)):
            raise BadInput(f"{self._path} is no file of measurements")
        return rows

    def _write(self, mode: str, rows: list[Row]) -> None:
        text = "".join(map(_line, rows))

        def write(path: Path) -> None:
            with path.open(mode, encoding="utf-8") as file:
                file.write(text)

        self._guarded(write)

    def _guarded(self, use: Callable[[Path], Any]) -> Any:
        assert self._path is not None
        try:
            return use(self._path)
        except (OSError, UnicodeDecodeError) as error:
            raise CannotCreate(f"cannot use {self._path}", str(error)) from error


def _line(row: Row) -> str:
    return json.dumps(row, ensure_ascii=False) + "\n"
