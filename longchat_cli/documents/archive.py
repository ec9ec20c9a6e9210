"""Archives: the files in a zip or tar, and single packed files, read in memory; no file is written."""

from __future__ import annotations

import stat
import tarfile
import zipfile
from collections.abc import Iterator
from io import BytesIO
from pathlib import PurePosixPath
from typing import Any

from longchat_cli.documents import formats, package
from longchat_cli.documents.document import Collection, Document, Skip
from longchat_cli.documents.member import Options, order, read_member
from longchat_cli.documents.names import printable
from longchat_cli.documents.package import Allowance, Exhausted, Refused

_LINK = "link, not followed"
_SPECIAL = "not a regular file"
Entry = tuple[str, bytes | Refused]
"""(path in the archive, content or why there is none)."""


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
            for path, content in self._entries(root, data):
                self._take(root / path, content, depth)
        except Refused as error:
            self.skips.append(Skip(printable(root), str(error)))

    def _take(self, path: PurePosixPath, content: bytes | Refused, depth: int) -> None:
        name = printable(path)
        if isinstance(content, Refused):
            self.skips.append(Skip(name, str(content)))
        elif formats.is_archive(name, content):
            if depth == package.MAX_DEPTH:
                self.skips.append(Skip(name, f"archives nested more than {package.MAX_DEPTH} deep"))
            else:
                self.read(path, content, depth + 1)
        else:
            result = read_member(name, content, self._options)
            if isinstance(result, Document):
                self.documents.append((order(path), result))
            else:
                self.skips.append(result)

    def _entries(self, root: PurePosixPath, data: bytes) -> Iterator[Entry]:
        """Raises Refused when the archive cannot be read (on)."""
        data = package.unpacked(data, self._allowance)
        if data.startswith(b"PK"):
            entries = self._zipped(data)
        elif _is_tar(data):
            entries = self._taped(data)
        else:
            entries = iter([(root.stem, data)])
        for path, content in entries:
            self._allowance.enter()
            if ".git" in PurePosixPath(path).parts or "__MACOSX" in PurePosixPath(path).parts:
                continue
            if self._options.leaves_out(path):
                self.ignored += 1
            elif _escapes(path):
                yield path.replace("..", "").strip("/") or "?", Refused("its path leads out of the archive")
            else:
                yield path, content

    def _zipped(self, data: bytes) -> Iterator[Entry]:
        with package.open_zip(data) as archive:
            for member in archive.infolist():
                kind = stat.S_IFMT(member.external_attr >> 16)
                if member.is_dir():
                    continue
                if kind not in (0, stat.S_IFREG):
                    yield member.filename, Refused(_LINK if kind == stat.S_IFLNK else _SPECIAL)
                    continue
                yield member.filename, self._content(archive, member)

    def _content(self, archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> bytes | Refused:
        try:
            return package.read_zipped(archive, member, self._allowance)
        except Exhausted:
            raise
        except Refused as error:
            return error

    def _taped(self, data: bytes) -> Iterator[Entry]:
        try:
            with tarfile.open(fileobj=BytesIO(data), mode="r:", errorlevel=0) as archive:
                for member in archive:
                    if member.isdir():
                        continue
                    stream = archive.extractfile(member) if member.isreg() else None
                    if stream is None:
                        linked = member.issym() or member.islnk()
                        yield member.name, Refused(_LINK if linked else _SPECIAL)
                    else:
                        yield member.name, self._allowance.read(stream, len(data))
        except package.DAMAGE as error:
            raise Refused(f"damaged from here on ({error})") from error


def _is_tar(data: bytes) -> bool:
    return data[257:262] == b"ustar"


def _escapes(path: str) -> bool:
    parts = PurePosixPath(path.replace("\\", "/")).parts
    return ".." in parts or path.startswith(("/", "\\")) or path[1:2] == ":"
