"""HTML and XHTML trees to text: blocks apart, scripts out, every word with the line it stands on."""

from __future__ import annotations

import re
from collections import Counter
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
_ARTICLES = ("article", "blockquote", "main")
"""Elements whose footers are part of the text."""
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
        self._line, self._place = 1, ""
        self._depth: Counter[str] = Counter()  # open elements by tag
        self._navigation: list[tuple[Element, int]] = []  # open ones and where their text begins

    def write(self, root: Element, place: str = "", places: Mapping[str, str] | None = None) -> str:
        """Write all text below `root`. An element whose id is in `places` begins that place.

        Returns the place that the text ends in.
        """
        self._line, self._place = 1, place
        walk = etree.iterwalk(root, events=("start", "end", "comment", "pi"))
        for event, node in walk:
            tag = local_name(node)
            if event == "end":
                self._end(tag, node)
            else:
                self._line = node.sourceline or self._line  # where the tag or comment ends
            if event == "start":
                self._start(tag, node, places or {})
                if tag in _SILENT:
                    walk.skip_subtree()
            elif node is not root:
                self._add(node.tail)
        return self._place

    def _start(self, tag: str, node: Element, places: Mapping[str, str]) -> None:
        self._separate(tag)
        if anchor := node.get("id") or node.get("name"):
            self._place = places.get(anchor, self._place)
        if self._is_navigation(tag, node):
            self._navigation.append((node, self.builder.length))
        self._depth[tag] += 1
        if tag in _SILENT:
            self._line += "".join(node.itertext()).count("\n")
        else:
            self._add(node.text)

    def _end(self, tag: str, node: Element) -> None:
        self._depth[tag] -= 1
        self._separate(tag)
        if self._navigation and self._navigation[-1][0] is node:
            begin = self._navigation.pop()[1]
            if self.builder.length > begin:
                self.cuts.append(Cut(begin, self.builder.length, "navigation"))

    def _add(self, text: str | None) -> None:
        """Write text that begins on the line reached."""
        if not text:
            return
        if not self._depth["pre"]:
            self.builder.flowing(text, self._line, self._place)
        elif text.strip():
            begin = len(text) - len(text.lstrip("\n"))
            end = len(text.rstrip("\n"))
            self.builder.separate("\n" if begin else "")
            self.builder.verbatim(text[begin:end], self._line + begin, self._place)
            self.builder.separate("\n" if end < len(text) else "")
        self._line += text.count("\n")

    def _separate(self, tag: str) -> None:
        if tag in _PARAGRAPHS:
            self.builder.separate("\n\n")
        elif tag in _LINES:
            self.builder.separate("\n")
        elif tag in _CELLS:
            self.builder.separate("\t")

    def _is_navigation(self, tag: str, node: Element) -> bool:
        if tag == "footer" and not any(self._depth[name] for name in _ARTICLES):
            return True
        return tag == "nav" or node.get("role") in _NAVIGATION
