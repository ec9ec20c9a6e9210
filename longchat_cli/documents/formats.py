"""Which reader serves which file: by suffix, then by the first bytes, else plain text."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import PurePath

from longchat_cli.documents import text
from longchat_cli.documents.document import Document
from longchat_cli.errors import BadInput

Reader = Callable[[str, bytes], Document]
"""(name, the file's bytes) to a Document; raises BadInput."""


def parse(name: str, data: bytes) -> Document:
    """Read a file of any known format. Raises BadInput, with one line that says why not."""
    if not data:
        raise BadInput(f"{name} holds no text", "empty")
    return _reader(name, data)(name, data)


def _unsupported(kind: str) -> Reader:
    def refuse(name: str, data: bytes) -> Document:
        raise BadInput(f"{name} cannot be read", f"{kind} is not supported yet", "convert it to text first")

    return refuse


def _reader(name: str, data: bytes) -> Reader:
    suffix = PurePath(name).suffix.lower()
    if suffix not in READERS:
        suffix = next((of for start, of in _SIGNATURES if data.startswith(start)), "")
    return READERS.get(suffix, text.parse)


READERS: dict[str, Reader] = {
    suffix: _unsupported(kind)
    for kind, suffixes in {
        "PDF": ".pdf",
        "EPUB": ".epub .mobi .azw3",
        "an office document": ".docx .doc .odt .pptx .ppt .xlsx .xls .ods",
        "an archive": ".zip .tar .tgz .gz .bz2 .xz .zst .7z .rar",
    }.items()
    for suffix in suffixes.split()
}
_SIGNATURES = (
    (b"%PDF-", ".pdf"),
    (b"PK\x03\x04", ".zip"),
    (b"\x1f\x8b", ".gz"),
    (b"BZh", ".bz2"),
    (b"\xfd7zXZ\0", ".xz"),
    (b"\xd0\xcf\x11\xe0", ".doc"),
)
