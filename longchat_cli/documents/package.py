"""Unpacking with limits: what an archive, book or office file may unpack to before it is refused."""

from __future__ import annotations

import bz2
import contextlib
import gzip
import lzma
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from io import BytesIO
from typing import IO, Any

from longchat_cli.config import format_bytes
from longchat_cli.documents.names import brief

MAX_MEMBER = 64 << 20
MAX_TOTAL = 256 << 20
MAX_MEMBERS = 10_000
MAX_DEPTH = 3
MAX_RATIO = 200
"""Bytes unpacked per byte packed; text stays far below."""
_UNSUSPICIOUS = 1 << 20
"""Bytes that may be unpacked at any ratio: a short run of blanks packs well."""

_DAMAGE = (
    zipfile.BadZipFile, zlib.error, lzma.LZMAError, tarfile.TarError, struct.error, EOFError, OSError,
    ValueError, OverflowError, IndexError, KeyError, AttributeError, RuntimeError,
)  # fmt: skip
"""What the standard library raises on damaged archives."""
_OPENERS: dict[bytes, Callable[..., Any]] = {
    b"\x1f\x8b": gzip.open,
    b"BZh": bz2.open,
    b"\xfd7zXZ\0": lzma.open,
}


class Refused(Exception):
    """A member is not unpacked; the message is the reason."""


class Exhausted(Refused):
    """Nothing more of the archive is unpacked."""


class Allowance:
    """What may still be unpacked of one outermost file, whatever is nested in it."""

    def __init__(self) -> None:
        self._members, self._bytes = 0, 0

    def enter(self) -> None:
        """Count a member. Raises Exhausted."""
        self._members += 1
        if self._members > MAX_MEMBERS:
            raise Exhausted(f"more than {MAX_MEMBERS:,} files in the archive")

    def read(self, stream: IO[bytes], packed: int, most: int) -> bytes:
        """Read `stream`, unpacked from `packed` bytes, to its end; `most` bytes. Raises Refused, Exhausted.

        Sizes that an archive states are not believed.
        """
        ratio = max(packed * MAX_RATIO, _UNSUSPICIOUS)
        left = MAX_TOTAL - self._bytes
        data = stream.read(min(most, ratio, left) + 1)
        self._bytes += len(data)
        if len(data) > left:
            raise Exhausted(f"the archive unpacks to more than {format_bytes(MAX_TOTAL)}")
        if len(data) > ratio:
            raise Refused(f"unpacks to more than {MAX_RATIO} times its size, as a bomb does")
        if len(data) > most:
            raise Refused(f"too large unpacked (limit {format_bytes(most)})")
        return data


@contextlib.contextmanager
def damage(how: str = "damaged") -> Iterator[None]:
    """Turn what a damaged archive raises in the body into Refused."""
    try:
        yield
    except NotImplementedError as error:
        raise Refused("packed in an unknown way") from error
    except _DAMAGE as error:
        raise Refused(f"{how} ({brief(error)})") from error


def open_zip(data: bytes) -> zipfile.ZipFile:
    """The zip file in memory. Raises Refused when its directory is damaged."""
    with damage():
        return zipfile.ZipFile(BytesIO(data))


def read_zipped(archive: zipfile.ZipFile, member: zipfile.ZipInfo, allowance: Allowance) -> bytes:
    """A member's bytes. Raises Refused: encrypted, damaged, over a limit."""
    if member.flag_bits & 1:
        raise Refused("protected by a password")
    with damage(), archive.open(member) as stream:
        return allowance.read(stream, member.compress_size, MAX_MEMBER)


def read_taped(archive: tarfile.TarFile, member: tarfile.TarInfo, allowance: Allowance) -> bytes:
    """A regular member's bytes. Raises Refused: damaged, over a limit."""
    with damage():
        stream = archive.extractfile(member)
        return allowance.read(stream, member.size, MAX_MEMBER) if stream else b""


def unpacked(data: bytes, allowance: Allowance) -> bytes:
    """The content of a .gz, .bz2 or .xz file; other data as it is. Raises Refused."""
    opener = next((opener for start, opener in _OPENERS.items() if data.startswith(start)), None)
    if opener is None:
        return data
    with damage(), opener(BytesIO(data)) as stream:
        return allowance.read(stream, len(data), MAX_TOTAL)
