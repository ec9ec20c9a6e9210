"""Word documents: the paragraphs, tables and notes, placed by paragraph and heading."""

from __future__ import annotations

from collections.abc import Iterator
from zipfile import ZipFile

from lxml import etree

from longchat_cli.documents import markup, package
from longchat_cli.documents.builder import Builder
from longchat_cli.documents.document import Document
from longchat_cli.documents.names import brief, heading
from longchat_cli.documents.package import Allowance, Refused
from longchat_cli.documents.text import require_text
from longchat_cli.errors import BadInput

_OLE = b"\xd0\xcf\x11\xe0"
_BODY = "word/document.xml"
_NOTES = {"word/footnotes.xml": "footnote", "word/endnotes.xml": "endnote"}


def parse(name: str, data: bytes) -> Document:
    """A .docx file's bytes to a Document. Raises BadInput: damaged, encrypted, over the limits of `package`.

    Inserted text is read, deleted text is not.
    """
    if data.startswith(_OLE):
        raise BadInput(f"{name} cannot be read", "protected by a password, or an old .doc file")
    builder = Builder()
    try:
        with package.open_zip(data) as archive:
            _write(archive, builder)
    except Refused as error:
        raise BadInput(f"{name} cannot be read", str(error)) from error
    return require_text(Document(name, builder.text, "docx", marks=tuple(builder.marks)))


def _write(archive: ZipFile, builder: Builder) -> None:
    members = {member.filename: member for member in archive.infolist()}
    allowance = Allowance()

    def part(path: str) -> markup.Element:
        try:
            return markup.xml_tree(package.read_zipped(archive, members[path], allowance))
        except ValueError as error:
            raise Refused(f"damaged ({path}: {brief(error)})") from error

    if _BODY not in members:
        raise Refused(f"damaged ({_BODY} is missing)")
    headings = _headings(part("word/styles.xml")) if "word/styles.xml" in members else set()
    _Flow(builder, headings).write(part(_BODY))
    for path, kind in _NOTES.items():
        if path in members:
            for note in part(path).iterchildren(f"{{*}}{kind}"):
                if not _value(note, "type"):  # the others are separator lines
                    _Flow(builder, set(), f"{kind} {_value(note, 'id')}").write(note)


def _headings(styles: markup.Element) -> set[str]:
    """Ids of the styles that are headings; ids are translated, names are not."""
    return {
        _value(style, "styleId")
        for style in styles.iter("{*}style")
        for name in style.iterchildren("{*}name")
        if _value(name, "val").lower().startswith(("heading", "title"))
    }


class _Flow:
    """Writes one flow of paragraphs. `place` stands for paragraph numbers where there are none."""

    def __init__(self, builder: Builder, headings: set[str], place: str = "") -> None:
        self._builder, self._headings, self._fixed = builder, headings, place
        self._number, self._line, self._heading, self._place = 0, 1, "", place

    def write(self, root: markup.Element) -> None:
        """Write all text below `root`."""
        walk = etree.iterwalk(root, events=("start", "end"))
        tables = 0
        for event, node in walk:
            kind = etree.QName(node).localname
            tables += (kind == "tbl") * (1 if event == "start" else -1)
            if event == "start" and kind == "Fallback":  # says again what its alternative says
                walk.skip_subtree()
            elif kind == "p":
                if event == "start":
                    self._begin(node)
                self._builder.separate(" " if tables else "\n\n")
            elif kind in _SEPARATORS:
                self._builder.separate(_SEPARATORS[kind])
            elif event == "start" and kind == "t":
                self._add(node.text or "")
            elif event == "start" and kind in _SIGNS and node.getparent().tag.endswith("}r"):
                self._add(_SIGNS[kind])

    def _add(self, text: str) -> None:
        self._builder.verbatim(text, self._line, self._place)
        self._line += text.count("\n")

    def _begin(self, paragraph: markup.Element) -> None:
        self._number, self._line = self._number + 1, 1
        style = next(paragraph.iter("{*}pStyle"), None)
        if style is not None and _value(style, "val") in self._headings:
            self._heading = heading(_texts(paragraph))
        under = f" ({self._heading})" if self._heading else ""
        self._place = self._fixed or f"paragraph {self._number}{under}"


def _texts(paragraph: markup.Element) -> Iterator[str]:
    return (node.text or "" for node in paragraph.iter("{*}t"))


def _value(node: markup.Element, name: str) -> str:
    """An attribute of any namespace: transitional and strict documents have different ones."""
    return str(next((value for key, value in node.items() if key.rpartition("}")[2] == name), ""))


_SIGNS = {"tab": "\t", "br": "\n", "cr": "\n", "noBreakHyphen": "-"}
_SEPARATORS = {"tc": "\t", "tr": "\n", "tbl": "\n\n"}
