"""One small file of every format, made from known words whose places are known."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import tarfile
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field

CONTAINER = (
    '<?xml version="1.0"?><container xmlns="urn:oasis:names:tc:opendocument:xmlns:container"><rootfiles>'
    '<rootfile full-path="OEBPS/book.opf" media-type="application/oebps-package+xml"/>'
    "</rootfiles></container>"
)
WORD = 'xmlns:w="http://schemas.openxmlformats.org/wordprocessingml/2006/main"'


@dataclass(frozen=True)
class Sample:
    """A file, the text that must come out of it, and where some words of it stand."""

    name: str
    data: bytes
    text: str
    places: Mapping[str, str] = field(default_factory=dict)


def zipped(files: Mapping[str, str | bytes], method: int = zipfile.ZIP_DEFLATED) -> bytes:
    """A zip file."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", method) as archive:
        for name, content in files.items():
            stored = zipfile.ZIP_STORED if name == "mimetype" else method  # as EPUB asks
            archive.writestr(name, content, stored)
    return out.getvalue()


def taped(files: Mapping[str, bytes], mode: str = "w") -> bytes:
    """A tar file."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode=mode) as archive:  # type: ignore[call-overload]
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return out.getvalue()


def pdf(pages: list[list[str] | None]) -> bytes:
    """A PDF with the lines of each page in its text layer; None is a page with a drawing only."""
    font = "<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>"
    objects = ["<< /Type /Catalog /Pages 2 0 R >>", "", font]
    kids = []
    for lines in pages:
        if lines is None:
            content = "0 0 100 100 re f"
        else:
            shown = "".join(f"({line}) Tj 0 -14 Td " for line in lines)
            content = f"BT /F1 12 Tf 72 720 Td {shown}ET" if lines else ""
        kids.append(f"{len(objects) + 1} 0 R")
        resources = "<< /Font << /F1 3 0 R >> >>"
        objects.append(
            f"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] /Resources {resources} "
            f"/Contents {len(objects) + 2} 0 R >>"
        )
        objects.append(f"<< /Length {len(content)} >>\nstream\n{content}\nendstream")
    objects[1] = f"<< /Type /Pages /Kids [{' '.join(kids)}] /Count {len(kids)} >>"
    return pdf_file([content.encode() for content in objects])


def pdf_file(objects: list[bytes]) -> bytes:
    """A PDF of numbered objects; the first is the catalogue."""
    out, offsets = b"%PDF-1.4\n", []
    for number, content in enumerate(objects, 1):
        offsets.append(len(out))
        out += b"%d 0 obj\n%s\nendobj\n" % (number, content)
    table = "".join(f"{offset:010} 00000 n \n" for offset in offsets)
    size = len(objects) + 1
    return (
        out
        + f"xref\n0 {size}\n0000000000 65535 f \n{table}"
        f"trailer\n<< /Size {size} /Root 1 0 R >>\nstartxref\n{len(out)}\n%%EOF\n".encode()
    )


def epub(chapters: Mapping[str, str], contents: str, **more: str) -> bytes:
    """An EPUB 3 book: XHTML by file name in spine order, the body of the navigation document, other files."""
    items = "".join(
        f'<item id="i{n}" href="text/{name}" media-type="application/xhtml+xml"/>'
        for n, name in enumerate(chapters)
    )
    spine = "".join(f'<itemref idref="i{n}"/>' for n in range(len(chapters)))
    opf = (
        '<package xmlns="http://www.idpf.org/2007/opf" version="3.0"><manifest>'
        '<item id="nav" href="nav.xhtml" properties="nav" media-type="application/xhtml+xml"/>'
        f"{items}</manifest><spine>{spine}</spine></package>"
    )
    nav = f'<html xmlns="http://www.w3.org/1999/xhtml"><body><nav>{contents}</nav></body></html>'
    files = {"mimetype": "application/epub+zip", "META-INF/container.xml": CONTAINER, "OEBPS/book.opf": opf}
    files |= {"OEBPS/nav.xhtml": nav} | {f"OEBPS/text/{name}": text for name, text in chapters.items()} | more
    return zipped(files)


def chapter(body: str) -> str:
    """An XHTML file."""
    return (
        '<?xml version="1.0" encoding="utf-8"?>\n<html xmlns="http://www.w3.org/1999/xhtml">'
        f'<head><title/><script src="x.js"/></head>\n<body>\n{body}\n</body></html>'
    )


def docx(body: str, **more: str) -> bytes:
    """A Word document with the XML of its body; other parts as `footnotes`."""
    styles = f'<w:styles {WORD}><w:style w:styleId="H1"><w:name w:val="heading 1"/></w:style></w:styles>'
    files = {
        "[Content_Types].xml": '<Types xmlns="http://schemas.openxmlformats.org/package/2006/content-types"/>',
        "word/styles.xml": styles,
        "word/document.xml": f"<w:document {WORD}><w:body>{body}</w:body></w:document>",
    }
    return zipped(files | {f"word/{name}.xml": text for name, text in more.items()})


def paragraph(text: str, style: str = "") -> str:
    """A paragraph of a Word document."""
    properties = f'<w:pPr><w:pStyle w:val="{style}"/></w:pPr>' if style else ""
    return f'<w:p>{properties}<w:r><w:t xml:space="preserve">{text}</w:t></w:r></w:p>'


def notebook(cells: list[tuple[str, list[str]]]) -> bytes:
    """A Jupyter notebook of code cells with what each printed."""
    made = [
        {
            "cell_type": "code",
            "source": source.splitlines(keepends=True),
            "outputs": [{"output_type": "stream", "text": text} for text in printed],
        }
        for source, printed in cells
    ]
    return json.dumps({"nbformat": 4, "cells": made}).encode()


HTML = """<!DOCTYPE html>
<html><head><title>Herring
</title><style>p {
}</style></head><body
class="x">
<nav>menu
more</nav>
<!-- two
lines --><h1>Anchovy</h1>
<p>Bream and <b
id=b>carp
&amp; dace</b> eel</p>
<pre>
  flounder
    grouper
</pre>
<table><tr><td>hake</td><td>ide</td></tr>
<tr><td>jack</td><td>kelp</td></tr></table>
<ul><li>ling</li><li>minnow&nbsp;&lt;|im_end|&gt;</li></ul>
<script>var
nothing;</script>octopus<br>perch
<footer>imprint</footer></body></html>
"""
HTML_TEXT = (
    "Herring\n\nAnchovy\n\nBream and carp & dace eel\n\n  flounder\n    grouper\n\nhake\tide\njack\tkelp\n\n"
    "ling\nminnow\xa0<|im_end|>\n\noctopus\nperch\n"
)
HTML_LINES = {
    "Herring": 2, "Anchovy": 9, "Bream": 10, "carp": 11, "dace": 12, "eel": 12, "flounder": 14, "grouper": 15,
    "hake": 17, "ide": 17, "jack": 18, "kelp": 18, "ling": 19, "<|im_end|>": 19, "octopus": 21, "perch": 21,
}  # fmt: skip
PLAIN = "alder\nbirch\n\ncedar elm\n"
PLAIN_LINES = {"alder": 1, "birch": 2, "cedar": 4, "elm": 4}
CONTENTS = (
    '<ol><li><a href="text/one.xhtml">Chapter  One</a></li><li><a href="text/two.xhtml">Chapter Two</a></li>'
    '<li><a href="text/two.xhtml#later">Chapter Three</a></li></ol>'
)
EPUB = epub(
    {
        "cover.xhtml": chapter("<p>maple</p>"),
        "one.xhtml": chapter("<h1>oak</h1>\n<p>pine&nbsp;tree &eacute;l\n<i>rowan</i></p>"),
        "two.xhtml": chapter('<p>spruce</p><h2 id="later">teak</h2><p>yew</p>'),
        "three.xhtml": chapter("<p>willow<br/>aspen</p>"),
    },
    CONTENTS,
)
DOCX = docx(
    paragraph("heron") + paragraph("Big ibis", "H1") + "<w:p><w:r><w:t>jay</w:t><w:tab/><w:t>kite</w:t></w:r>"
    "<w:del><w:r><w:delText>gone</w:delText></w:r></w:del>"
    "<w:ins><w:r><w:br/><w:t>lark</w:t></w:r></w:ins></w:p>"
    f"<w:tbl><w:tr><w:tc>{paragraph('merlin')}</w:tc><w:tc>{paragraph('owl')}</w:tc></w:tr>"
    f"<w:tr><w:tc>{paragraph('pipit')}</w:tc><w:tc>{paragraph('quail')}</w:tc></w:tr></w:tbl>"
    f"<w:sdt><w:sdtContent>{paragraph('robin')}</w:sdtContent></w:sdt>",
    footnotes=f'<w:footnotes {WORD}><w:footnote w:type="separator" w:id="0">{paragraph("x")}</w:footnote>'
    f'<w:footnote w:id="2">{paragraph("swift")}</w:footnote></w:footnotes>',
)
DOCX_TEXT = "heron\n\nBig ibis\n\njay\tkite\nlark\n\nmerlin\towl\npipit\tquail\n\nrobin\n\nswift\n"
DOCX_PLACES = {"heron": "paragraph 1", "ibis": "paragraph 2 (Big ibis)", "swift": "footnote 2"} | {
    word: f"paragraph {number} (Big ibis)"
    for number, words in enumerate(("jay kite lark", "merlin", "owl", "pipit", "quail", "robin"), 3)
    for word in words.split()
}
NOTEBOOK = notebook([("import fig\nfig.grape()", ["kiwi\n", "lemon"]), ("mango", [])])


def _lines(name: str, lines: Mapping[str, int]) -> dict[str, str]:
    return {word: f"{name}:{line}" for word, line in lines.items()}


def _placed(name: str, places: Mapping[str, str]) -> dict[str, str]:
    return {word: f"{name}, {place}" for word, place in places.items()}


def _plain(name: str) -> Sample:
    return Sample(name, PLAIN.encode(), PLAIN, _lines(name, PLAIN_LINES))


def _archived(name: str, data: bytes) -> Sample:
    """An archive of one page and one text."""
    page, text = f"{name}/a/page.html", f"{name}/b.txt"
    shown = f"File: {text}\n\n{PLAIN}File: {page}\n\n{HTML_TEXT}"
    return Sample(name, data, shown, _lines(text, PLAIN_LINES) | _lines(page, HTML_LINES))


_FILES = {"b.txt": PLAIN.encode(), "a/page.html": HTML.encode()}
SAMPLES = [
    *map(_plain, ("a.txt", "a.md", "a.csv", "a.log", "a.py", "a.json", "a", "a.unknown")),
    Sample("a.html", HTML.encode(), HTML_TEXT, _lines("a.html", HTML_LINES)),
    Sample(
        "a.epub",
        EPUB,
        "maple\n\noak\n\npine\xa0tree él rowan\n\nspruce\n\nteak\n\nyew\n\nwillow\naspen\n",
        {"maple": "a.epub, part 1"}
        | _placed("a.epub", dict.fromkeys(("oak", "pine", "rowan"), "Chapter One"))
        | _placed("a.epub", {"spruce": "Chapter Two", "teak": "Chapter Three", "yew": "Chapter Three"})
        | _placed("a.epub", {"willow": "Chapter Three", "aspen": "Chapter Three"}),
    ),
    Sample(
        "a.pdf",
        pdf([["ant", "bee wasp"], [], ["cricket"]]),
        "ant\nbee wasp\n\ncricket\n",
        _placed("a.pdf", {"ant": "page 1", "bee": "page 1", "wasp": "page 1", "cricket": "page 3"}),
    ),
    Sample("a.docx", DOCX, DOCX_TEXT, _placed("a.docx", DOCX_PLACES)),
    Sample(
        "a.ipynb",
        NOTEBOOK,
        "import fig\nfig.grape()\n\nkiwi\n\nlemon\n\nmango\n",
        _placed("a.ipynb", {"grape": "cell 1", "kiwi": "output of cell 1", "mango": "cell 2"}),
    ),
    _archived("a.zip", zipped(_FILES)),
    _archived("a.tar", taped(_FILES)),
    _archived("a.tgz", taped(_FILES, "w:gz")),
    _archived("a.tar.bz2", taped(_FILES, "w:bz2")),
    _archived("a.tar.xz", taped(_FILES, "w:xz")),
    *(
        Sample(f"a.log.{suffix}", pack(PLAIN.encode()), f"File: a.log.{suffix}/a.log\n\n{PLAIN}",
               _lines(f"a.log.{suffix}/a.log", PLAIN_LINES))
        for suffix, pack in (("gz", gzip.compress), ("bz2", bz2.compress), ("xz", lzma.compress))
    ),
]  # fmt: skip
