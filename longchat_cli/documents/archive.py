"""Archives: the files in a zip or tar, and single packed files, read in memory; no file is written."""

from __future__ import annotations

import stat
import tarfile
from collections.abc import Callable, Iterator
from functools import partial
from io import BytesIO
from pathlib import PurePosixPath
from typing import Any

from longchat_cli.documents import formats, package
from longchat_cli.documents.document import Collection, Document, Skip
from longchat_cli.documents.member import Options, order, read_member
from longchat_cli.documents.names import printable
from longchat_cli.documents.package import Allowance, Exhausted, Refused

Entry = tuple[str, Callable[[], bytes]]
"""(path in the archive, what reads the content or raises Refused)."""


def read_archive(name: str, data: bytes, options: Options) -> Collection:
    """Every readable file of an archive, in the order of a folder; what cannot be read is skipped."""
    reader = _Reader(options)
    reader.read(PurePosixPath(name), data, 1)
    found = Collection([], reader.skips, reader.ignored)
    for _, document in sorted(reader.documents, key=lambda each: each[0]):
        found.add(document)
    return found


class _Reader:
    """One outermost archive with all that is nested in it."""

    def __init__(self, options: Options) -> None:
        self._options, self._allowance = options, Allowance()
        self.documents: list[tuple[Any, Document]] = []
        self.skips: list[Skip] = []
        self.ignored = 0

    def read(self, root: PurePosixPath, data: bytes, depth: int) -> None:
        """Read the archive `data`, whose files are called `root`/path."""
        try:
            for path, load in self._entries(root, data):
                self._allowance.enter()
                if {".git", "__MACOSX"} & set(PurePosixPath(path).parts):
                    continue
                if self._options.leaves_out(path):
                    self.ignored += 1
                else:
                    self._take(root / path.lstrip("/"), load, depth)
        except Refused as error:
            self.skips.append(Skip(printable(root), str(error)))

    def _take(self, path: PurePosixPath, load: Callable[[], bytes], depth: int) -> None:
        name = printable(path)
        try:
            if ".." in path.parts:
                raise Refused("its path leads out of the archive")
            content = load()
            nested = formats.is_archive(name, content)
            if nested and depth == package.MAX_DEPTH:
                raise Refused(f"archive nested more than {package.MAX_DEPTH} deep")
        except Exhausted:
            raise
        except Refused as error:
            self.skips.append(Skip(name, str(error)))
            return
        if nested:
            self.read(path, content, depth + 1)
            return
        result = read_member(name, content, self._options)
        if isinstance(result, Document):
            self.documents.append((order(path), result))
        else:
            self.skips.append(result)

    def _entries(self, root: PurePosixPath, data: bytes) -> Iterator[Entry]:
        """Raises Refused when the archive cannot be read (on)."""
        data = package.unpacked(data, self._allowance)
        if data.startswith(b"PK"):
            return self._zipped(data)
        if data[257:262] == b"ustar":
            return self._taped(data)
        return iter([(root.stem, lambda: data)])

    def _zipped(self, data: bytes) -> Iterator[Entry]:
        with package.open_zip(data) as archive:
            for member in archive.infolist():
                kind = stat.S_IFMT(member.external_attr >> 16)
                if member.is_dir():
                    continue
                if kind in (0, stat.S_IFREG):
                    yield member.filename, partial(package.read_zipped, archive, member, self._allowance)
                else:
                    yield member.filename, partial(_refuse, kind == stat.S_IFLNK)

    def _taped(self, data: bytes) -> Iterator[Entry]:
        with (
            package.damage("damaged from here on"),
            tarfile.open(fileobj=BytesIO(data), mode="r:") as archive,
        ):
            for member in archive:
                if member.isdir():
                    continue
                if member.isreg():
                    yield member.name, partial(package.read_taped, archive, member, self._allowance)
                else:
                    yield member.name, partial(_refuse, member.issym() or member.islnk())


def _refuse(linked: bool) -> bytes:
    raise Refused("link, not followed" if linked else "not a regular file")
