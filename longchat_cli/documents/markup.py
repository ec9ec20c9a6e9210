"""HTML and XHTML trees to text: blocks apart, scripts out, every word with the line it stands on."""

from __future__ import annotations

import re
from collections.abc import Mapping
from html.entities import html5
from typing import Any

from lxml import etree

from longchat_cli.documents.builder import Builder
from longchat_cli.documents.document import Cut

Element = Any

_SILENT = {"script", "style", "template", "iframe", "object", "svg"}
_PARAGRAPHS = {
    "address", "article", "aside", "blockquote", "dl", "fieldset", "figure", "footer", "form", "h1", "h2",
    "h3", "h4", "h5", "h6", "header", "hr", "main", "nav", "ol", "p", "pre", "section", "table", "title",
    "ul",
}  # fmt: skip
_LINES = {"br", "caption", "dd", "div", "dt", "figcaption", "legend", "li", "option", "summary", "tr"}
_CELLS = {"td", "th"}
_NAVIGATION = {"navigation", "search", "contentinfo"}
_XML_NAMES = {"amp", "lt", "gt", "quot", "apos"}


def html_tree(text: str) -> Element | None:
    """The tree of an HTML text; None when it holds nothing. Raises ValueError when it nests too deeply."""
    parser = etree.HTMLParser(encoding="utf-8", huge_tree=True, no_network=True)
    root = etree.fromstring(text.encode("utf-8", "replace"), parser)
    if any("depth" in error.message for error in parser.error_log):
        raise ValueError("elements nested more than 2,048 deep")
    return root


def xml_tree(data: bytes, encoding: str | None = None) -> Element:
    """A well-formed XML document without entity expansion, DTDs and network. Raises ValueError."""
    parser = etree.XMLParser(
        encoding=encoding, resolve_entities=False, load_dtd=False, no_network=True, remove_pis=True
    )
    try:
        root = etree.fromstring(data, parser)
    except etree.XMLSyntaxError as error:
        raise ValueError(error.msg or "not well-formed") from error
    declared = root.getroottree().docinfo.internalDTD
    if declared is not None and any(True for _ in declared.iterentities()):
        raise ValueError("it declares entities, which are not expanded")
    return root


def xhtml_tree(text: str) -> Element | None:
    """The tree of an XHTML text, by the rules of HTML where it is not well-formed. Raises ValueError."""
    named = re.sub(r"&(\w+);", _expanded, text)  # XML knows five names; the others would be lost
    try:
        return xml_tree(named.encode("utf-8", "replace"), "utf-8")
    except ValueError:
        return html_tree(text)


def _expanded(reference: re.Match[str]) -> str:
    name = reference[1]
    return reference[0] if name in _XML_NAMES else html5.get(f"{name};", reference[0])


def local_name(node: Element) -> str:
    """The tag without namespace, in lower case; "" for comments and references."""
    return node.tag.rpartition("}")[2].lower() if isinstance(node.tag, str) else ""


class Writer:
    """Writes trees into a builder; `cuts` are the navigation and footers among it."""

    def __init__(self, builder: Builder) -> None:
        self.builder = builder
        self.cuts: list[Cut] = []

    def write(self, root: Element, place: str = "", places: Mapping[str, str] | None = None) -> str:
        """Write all text below `root`. An element whose id is in `places` begins that place.

        Returns the place that the text ends in.
        """
        walk = etree.iterwalk(root, events=("start", "end", "comment", "pi"))
        line, verbatim, articles = 1, 0, 0
        opened: list[tuple[Element, int]] = []
        for event, node in walk:
            tag = local_name(node)
            if event != "end":
                line = node.sourceline or line  # where the tag or comment ends
            if event == "start":
                anchor = node.get("id") or node.get("name")
                place = places.get(anchor, place) if places and anchor else place
                self._separate(tag)
                if _is_navigation(tag, node, articles):
                    opened.append((node, self.builder.length))
                articles += tag in ("article", "blockquote", "main")
                verbatim += tag == "pre"
                if tag in _SILENT:
                    line += "".join(node.itertext()).count("\n")
                    walk.skip_subtree()
                else:
                    line = self._add(node.text, line, place, verbatim)
                continue
            if event == "end":
                articles -= tag in ("article", "blockquote", "main")
                verbatim -= tag == "pre"
                self._separate(tag)
                if opened and opened[-1][0] is node:
                    self._cut(opened.pop()[1])
            if node is not root:
                line = self._add(node.tail, line, place, verbatim)
        return place

    def _add(self, text: str | None, line: int, place: str, verbatim: int) -> int:
        """Write text that begins on `line`; the line it ends on."""
        if not text:
            return line
        if not verbatim:
            self.builder.flowing(text, line, place)
        elif text.strip():
            begin = len(text) - len(text.lstrip("\n"))
            end = len(text.rstrip("\n"))
            self.builder.separate("\n" if begin else "")
            self.builder.verbatim(text[begin:end], line + begin, place)
            self.builder.separate("\n" if end < len(text) else "")
        return line + text.count("\n")

    def _separate(self, tag: str) -> None:
        if tag in _PARAGRAPHS:
            self.builder.separate("\n\n")
        elif tag in _LINES:
            self.builder.separate("\n")
        elif tag in _CELLS:
            self.builder.separate("\t")

    def _cut(self, begin: int) -> None:
        if self.builder.length > begin:
            self.cuts.append(Cut(begin, self.builder.length, "navigation"))


def _is_navigation(tag: str, node: Element, articles: int) -> bool:
    return tag == "nav" or (tag == "footer" and not articles) or node.get("role") in _NAVIGATION
