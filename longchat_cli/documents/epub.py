"""EPUB: the chapters in the order of the spine, placed by their titles in the table of contents."""

from __future__ import annotations

import posixpath
from collections.abc import Iterator
from dataclasses import dataclass
from urllib.parse import unquote
from zipfile import ZipFile

from longchat_cli.documents import html, markup, package
from longchat_cli.documents.builder import Builder
from longchat_cli.documents.document import Document, Skip
from longchat_cli.documents.names import brief, heading, printable
from longchat_cli.documents.package import Allowance, Refused
from longchat_cli.documents.text import require_text
from longchat_cli.errors import BadInput

_CONTAINER = "META-INF/container.xml"
_ENCRYPTION = "META-INF/encryption.xml"


def parse(name: str, data: bytes) -> Document:
    """A book's bytes to a Document. Raises BadInput: damaged, encrypted, over the limits of `package`."""
    writer = markup.Writer(Builder())
    try:
        missing = [
            Skip(f"{name}, {place}", reason) for place, reason in _write(package.open_zip(data), writer)
        ]
    except Refused as error:
        raise BadInput(f"{name} cannot be read", str(error)) from error
    text, marks, cuts = writer.builder.text, tuple(writer.builder.marks), tuple(writer.cuts)
    if not marks and missing:
        raise BadInput(f"{name} cannot be read", missing[0].reason)
    return require_text(Document(name, text, "epub", marks=marks, cuts=cuts, missing=tuple(missing)))


def _write(archive: ZipFile, writer: markup.Writer) -> Iterator[tuple[str, str]]:
    """Write all chapters; (place, reason) of those that cannot be read. Raises Refused."""
    book = _Book(archive)
    titles: dict[str, dict[str, str]] = {}
    title = ""
    try:
        titles = book.titles()
    except Refused as error:
        yield "table of contents", str(error)
    for number, path in enumerate(book.spine(), 1):
        places = titles.get(path, {})
        title = places.get("", title)
        start = title or f"part {number}"
        try:
            page = book.page(path)
        except Refused as error:
            yield start, str(error)
            continue
        writer.builder.separate("\n\n")
        end = writer.write(next(_all(page, "body"), page), start, places)
        title = title if end == start else end


@dataclass(frozen=True)
class _Item:
    path: str
    media: str
    properties: str


class _Book:
    """The files of a book. Its methods raise Refused."""

    def __init__(self, archive: ZipFile) -> None:
        self._archive, self._allowance = archive, Allowance()
        self._names = {member.filename: member for member in archive.infolist()}
        if self._encrypted():
            raise Refused("protected by digital rights management")
        container = self._xml(_CONTAINER)
        self._root = next((str(node.get("full-path")) for node in _all(container, "rootfile")), "")
        self._package = self._xml(self._root)
        self._items = {
            node.get("id"): _Item(
                self._path(self._root, node.get("href") or ""),
                node.get("media-type") or "",
                node.get("properties") or "",
            )
            for node in _all(self._package, "item")
        }

    def spine(self) -> Iterator[str]:
        """Paths of the texts in reading order."""
        for reference in _all(self._package, "itemref"):
            if item := self._items.get(reference.get("idref")):
                yield item.path

    def titles(self) -> dict[str, dict[str, str]]:
        """{path: {element id, or "" for the file's beginning: title}} by the table of contents."""
        found: dict[str, dict[str, str]] = {}
        for path, fragment, title in self._contents():
            if title:
                found.setdefault(path, {}).setdefault(fragment, title)
        return found

    def page(self, path: str) -> markup.Element:
        """The tree of a text."""
        try:
            root = markup.xhtml_tree(html.page(path, self._read(path)).text)
        except (BadInput, ValueError) as error:
            why = error.why if isinstance(error, BadInput) else brief(error)
            raise Refused(f"{printable(path)}: {why}") from error
        if root is None:
            raise Refused(f"{printable(path)}: empty")
        return root

    def _contents(self) -> Iterator[tuple[str, str, str]]:
        """(path, fragment, title) of the entries of the EPUB 3 navigation, else of the EPUB 2 one."""
        for item in self._items.values():
            if "nav" in item.properties.split():
                for node in _all(self.page(item.path), "a"):
                    yield self._target(item.path, node.get("href"), node)
                return
        for item in self._items.values():
            if item.media == "application/x-dtbncx+xml":
                for point in _all(self._xml(item.path), "navpoint"):
                    label, content = (next(_all(point, tag), None) for tag in ("navlabel", "content"))
                    if label is not None and content is not None:
                        yield self._target(item.path, content.get("src"), label)

    def _target(self, base: str, href: str | None, label: markup.Element) -> tuple[str, str, str]:
        path, _, fragment = (href or "").partition("#")
        return self._path(base, path), fragment, heading(label.itertext())

    def _path(self, base: str, href: str) -> str:
        """A link to its file, which stands in the book or nowhere: names are only looked up, never opened."""
        return posixpath.normpath(posixpath.join(posixpath.dirname(base), unquote(href)))

    def _encrypted(self) -> bool:
        """Texts are encrypted; fonts may be without harm."""
        if _ENCRYPTION not in self._names:
            return False
        uris = [
            str(node.get("uri") or node.get("URI"))
            for node in _all(self._xml(_ENCRYPTION), "cipherreference")
        ]
        return any(uri.lower().partition("?")[0].endswith(("html", "htm", "xml")) for uri in uris)

    def _xml(self, path: str) -> markup.Element:
        try:
            return markup.xml_tree(self._read(path))
        except ValueError as error:
            raise Refused(f"damaged ({printable(path)}: {brief(error)})") from error

    def _read(self, path: str) -> bytes:
        if path not in self._names:
            raise Refused(f"{printable(path) or 'a file'} is not in the book")
        return package.read_zipped(self._archive, self._names[path], self._allowance)


def _all(root: markup.Element, name: str) -> Iterator[markup.Element]:
    return (node for node in root.iter() if markup.local_name(node) == name)
