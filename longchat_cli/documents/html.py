"""HTML pages: their text in reading order, each word on its line of the file."""

from __future__ import annotations

import re
from dataclasses import replace

from longchat_cli.documents import markup
from longchat_cli.documents.builder import Builder
from longchat_cli.documents.document import Document
from longchat_cli.documents.text import decoded, require_text
from longchat_cli.errors import BadInput

_CHARSET = re.compile(rb"(?:charset|encoding)\s*=\s*[\"']?\s*([\w.:-]+)", re.IGNORECASE)


def parse(name: str, data: bytes) -> Document:
    """A page's bytes to a Document. Raises BadInput when they are binary, hold no text or nest too deeply."""
    source = page(name, data)
    builder = Builder()
    writer = markup.Writer(builder)
    try:
        root = markup.html_tree(source.text)
    except ValueError as error:
        raise BadInput(f"{name} cannot be read", str(error)) from error
    if root is not None:
        writer.write(root)
    return require_text(
        replace(source, text=builder.text, marks=tuple(builder.marks), cuts=tuple(writer.cuts))
    )


def page(name: str, data: bytes) -> Document:
    """The source of a page, decoded as it declares or as any text. Raises BadInput."""
    declared = _CHARSET.search(data[:4096])
    return decoded(name, data, declared[1].decode("ascii") if declared else "")
