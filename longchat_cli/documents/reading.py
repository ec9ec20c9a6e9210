"""`read`: the documents named on a command line."""

from __future__ import annotations

import difflib
import errno
import os
import select
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

from longchat_cli.documents import formats, remote
from longchat_cli.documents.archive import read_archive
from longchat_cli.documents.clone import cloned
from longchat_cli.documents.document import Collection, Skip
from longchat_cli.documents.folder import read_folder
from longchat_cli.documents.member import Options
from longchat_cli.documents.names import printable
from longchat_cli.documents.remote import is_remote
from longchat_cli.errors import BadInput, MissingInput, NoText, StorageError, UsageError

_PIPE_PATIENCE = 5.0
"""Seconds to wait for somebody to open the other end of a named pipe."""


def read(
    names: Sequence[str], *, stdin: BinaryIO | None = None, options: Options | None = None
) -> Collection:
    """Read files, folders, archives, URLs and, for the name `-`, standard input, in the order given.

    An empty one among others is skipped. Raises MissingInput (not there, not permitted), NoText (all are
    empty), BadInput (binary, damaged, an unsupported format, a device, a folder or archive without text),
    StorageError (reading failed half way), Unavailable (a URL that does not answer, or offline) and
    UsageError (`-` without a stdin, or twice; a URL that is not https).
    """
    if list(names).count("-") > 1:
        raise UsageError("'-' is named twice", "standard input can be read once")
    options = options or Options()
    parts: list[Collection] = []
    empty = None
    for name in names:
        try:
            parts.append(_read_one(name, stdin, options))
        except NoText as error:
            empty = error
            parts.append(Collection([], [Skip(printable(name), error.why)]))
    if empty and not any(part.documents for part in parts):
        raise empty
    return Collection(
        [document for part in parts for document in part.documents],
        [skip for part in parts for skip in part.skips],
        sum(part.ignored for part in parts),
    )


def _read_one(name: str, stdin: BinaryIO | None, options: Options) -> Collection:
    if name == "-":
        if stdin is None:
            raise UsageError("there is no standard input to read")
        return _read_data("stdin", _read_stream(stdin), options)
    if is_remote(name):
        return _read_url(name, options)
    if not name:
        raise MissingInput("a document's name is empty", "", "name a file, a folder or -")
    shown = printable(name)
    if "\0" in name:
        raise MissingInput(f"{shown} does not exist")
    try:
        mode = Path(name).stat().st_mode
        if stat.S_ISDIR(mode):
            return _read_named_folder(name, options)
        if stat.S_ISREG(mode):
            data = Path(name).read_bytes()
        elif stat.S_ISFIFO(mode):
            data = _read_pipe(name)
        else:
            raise BadInput(f"{shown} cannot be read", "it is a device or a socket, not a document")
    except OSError as error:
        raise _as_longchat_error(name, error) from error
    return _read_data(shown, data, options)


def _read_url(url: str, options: Options) -> Collection:
    found = remote.locate(url)
    if isinstance(found, remote.Repository):
        with cloned(found) as folder:
            return _require_text(found.name, read_folder(folder, options, name=found.name))
    page = remote.fetch(found)
    return _read_data(printable(found), page.data, options, page.suffix)


def _read_data(name: str, data: bytes, options: Options, suffix: str = "") -> Collection:
    """`suffix`: the kind of file, where the name does not end with it."""
    if formats.is_archive(name, data, suffix):
        return _require_text(name, read_archive(name.partition("://")[2] or name, data, options))
    found = Collection([], [])
    found.add(formats.parse(name, data, options.boilerplate, suffix))
    return found


def _read_stream(stdin: BinaryIO) -> bytes:
    try:
        return stdin.read()
    except (OSError, ValueError) as error:
        raise StorageError("reading standard input failed", str(error)) from error


def _read_named_folder(name: str, options: Options) -> Collection:
    if not os.access(name, os.R_OK | os.X_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    return _require_text(printable(name), read_folder(Path(name), options))


def _require_text(name: str, found: Collection) -> Collection:
    if not found.documents:
        raise BadInput(f"{name} holds no text file", _census(found))
    return found


def _census(found: Collection) -> str:
    reasons = [skip.reason for skip in found.skips] + ["left out by a rule"] * found.ignored
    counts = (f"{reasons.count(reason)} x {reason}" for reason in dict.fromkeys(reasons))
    return ", ".join(counts) or "it is empty"


def _read_pipe(name: str) -> bytes:
    """A pipe to its end; a named one that nobody opens for writing is given up instead of waited for."""
    pipe = os.open(name, os.O_RDONLY | os.O_NONBLOCK)
    try:
        poll = select.poll()
        poll.register(pipe, select.POLLIN)
        chunks: list[bytes] = []
        opened = False
        while True:
            try:
                chunk = os.read(pipe, 1 << 20)
            except BlockingIOError:  # a writer is there and has nothing yet
                opened = True
                poll.poll()
                continue
            if chunk:
                chunks.append(chunk)
            elif chunks or opened or not poll.poll(_PIPE_PATIENCE * 1000):
                return b"".join(chunks)
            else:
                opened = True
    finally:
        os.close(pipe)


def _as_longchat_error(name: str, error: OSError) -> MissingInput | StorageError:
    shown = printable(name)
    if isinstance(error, PermissionError):
        return MissingInput(f"cannot read {shown}", "permission denied")
    absent = (errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG, errno.ELOOP)
    if error.errno in absent and os.path.islink(name):  # noqa: PTH114 - Path's raises for a long name
        return MissingInput(f"{shown} does not exist", "it is a link that leads nowhere")
    if error.errno in absent:
        near = difflib.get_close_matches(Path(name).name, _siblings(name), n=1)
        hint = f"did you mean {printable(near[0])}?" if near else ""
        return MissingInput(f"{shown} does not exist", "", hint)
    return StorageError(f"reading {shown} failed", error.strerror or str(error))


def _siblings(name: str) -> list[str]:
    try:
        return [path.name for path in Path(name).parent.iterdir()]
    except OSError:
        return []
