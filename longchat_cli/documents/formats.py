"""Which reader serves which file: by suffix, then by the first bytes, else plain text."""

from __future__ import annotations

from importlib import import_module
from pathlib import PurePath

from longchat_cli.documents import text
from longchat_cli.documents.boilerplate import settle
from longchat_cli.documents.document import Document
from longchat_cli.errors import BadInput, NoText

READERS = {
    ".pdf": "pdf",
    ".epub": "epub",
    ".docx": "docx",
    ".html": "html",
    ".htm": "html",
    ".xhtml": "html",
    ".ipynb": "notebook",
}
"""Suffix to the module here whose `parse(name, data)` reads it, imported at its first file: a library is
loaded only for who needs it. `parse` returns a Document and raises BadInput with one line that says why."""
ARCHIVES = {".zip", ".tar", ".tgz", ".tbz2", ".txz", ".gz", ".bz2", ".xz"}
_UNSUPPORTED = {
    ".7z", ".azw3", ".doc", ".mobi", ".odt", ".ppt", ".pptx", ".rar", ".rtf", ".xls", ".xlsx", ".ods", ".zst"
}  # fmt: skip
_SIGNATURES = (
    (b"%PDF-", ".pdf"),
    (b"\x1f\x8b", ".gz"),
    (b"BZh", ".bz2"),
    (b"\xfd7zXZ\0", ".xz"),
    (b"\xd0\xcf\x11\xe0", ".doc"),
)


def parse(name: str, data: bytes, boilerplate: str = "drop", suffix: str = "") -> Document:
    """Read a file of any known format; `suffix` says which where the name does not.

    Raises BadInput, with one line that says why not.
    """
    if not data:
        raise NoText(f"{name} holds no text", "empty")
    kind = _kind(name, data, suffix)
    if kind in _UNSUPPORTED:
        what = kind.removeprefix(".").upper()
        raise BadInput(f"{name} cannot be read", f"{what} is not supported", "convert it to text first")
    if kind not in READERS:
        return settle(text.parse(name, data), boilerplate)
    reader = import_module(f"longchat_cli.documents.{READERS[kind]}")
    return settle(reader.parse(name, data), boilerplate)


def is_archive(name: str, data: bytes, suffix: str = "") -> bool:
    """The file holds other files (or is one, packed)."""
    return _kind(name, data, suffix) in ARCHIVES


def _kind(name: str, data: bytes, suffix: str) -> str:
    suffix = suffix or PurePath(name).suffix.lower()
    if suffix in READERS or suffix in ARCHIVES or suffix in _UNSUPPORTED:
        return suffix
    if data.startswith(b"PK\x03\x04"):
        return _kind_of_zip(data)
    if not suffix and data[:1024].lstrip().lower().startswith((b"<!doctype html", b"<html")):
        return ".html"
    return next((kind for start, kind in _SIGNATURES if data.startswith(start)), "")


def _kind_of_zip(data: bytes) -> str:
    if data[30:58] == b"mimetypeapplication/epub+zip":
        return ".epub"
    return ".docx" if b"[Content_Types].xml" in data[:2000] and b"word/document.xml" in data else ".zip"
