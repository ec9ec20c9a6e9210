"""Every format: the text and the place of its words come back exactly; hostile files give one line each."""

import io
import zipfile
from dataclasses import asdict
from pathlib import Path

import pytest
import samples
from samples import SAMPLES, Sample

from longchat_cli import ask, documents
from longchat_cli.documents import Collection, Options
from longchat_cli.errors import BadInput, UsageError


def read(name: str, data: bytes, **options) -> Collection:
    Path(name).write_bytes(data)
    return documents.read([name], options=Options(**options))


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def require_text_and_places(found: Collection, sample: Sample) -> None:
    assert "".join(document.text for document in found.documents) == sample.text
    assert found.skips == []
    for word, place in sample.places.items():
        places = [
            str(document.locate(begin, begin + len(word)))
            for document in found.documents
            if (begin := document.text.find(word, document.header)) >= 0
        ]
        assert places == [place], word


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: sample.name)
def test_text_and_places(sample):
    require_text_and_places(read(sample.name, sample.data), sample)


@pytest.mark.parametrize(
    "encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-32", "latin-1", "cp1252", "cp1251"]
)
@pytest.mark.parametrize("suffix", ["txt", "md", "html"])
def test_encodings_of_texts(encoding, suffix):
    words = "Съешь же ещё этих мягких булок" if encoding == "cp1251" else "Le garçon mangé près du château"
    source = f'<meta charset="{encoding}">\r\n<p>{words}</p>\r\n<p>{words}</p>' if suffix == "html" else words
    sample = Sample(f"a.{suffix}", source.encode(encoding), "")
    (document,) = read(sample.name, sample.data).documents
    assert document.text.rstrip() == (f"{words}\n\n{words}" if suffix == "html" else words)
    if suffix == "html":
        assert document.locate(len(words) + 2, len(document.text)).line == 3


def test_a_page_may_declare_what_no_detector_guesses():
    source = '<html><meta http-equiv="content-type" content="text/html; charset=iso-8859-13"><p>ąžuolas</p>'
    (document,) = read("a.html", source.encode("iso-8859-13")).documents
    assert (document.text, document.encoding) == ("ąžuolas\n", "iso8859-13")


def test_formats_without_a_suffix_are_known_by_their_bytes():
    for sample in SAMPLES:
        if sample.name in ("a.pdf", "a.epub", "a.docx", "a.html"):
            assert documents.read(["-"], stdin=io.BytesIO(sample.data)).documents[0].text == sample.text


def test_a_passage_over_two_places_names_both():
    (document,) = read("a.pdf", samples.pdf([["one"], ["two"]])).documents
    location = document.locate(0, len(document.text))
    assert str(location) == "a.pdf, page 1 to page 2" and (location.line, location.end_line) == (1, 1)
    assert ask.place(asdict(location)) == str(location)  # what `ask` prints of a passage


def test_a_folder_reads_every_format_and_no_archive():
    Path("p").mkdir()
    for sample in SAMPLES:
        (Path("p") / sample.name).write_bytes(sample.data)
    found = documents.read(["p"])
    texts = {document.name: document.text[document.header :] for document in found.documents}
    plain = [sample for sample in SAMPLES if not sample.text.startswith("File: ")]
    assert texts == {f"p/{sample.name}": sample.text for sample in plain}
    assert {skip.reason for skip in found.skips} == {"an archive, read only when named itself"}
    (pdf,) = (document for document in found.documents if document.name == "p/a.pdf")
    begin = pdf.text.index("cricket")
    assert str(pdf.locate(begin, begin + 7)) == "p/a.pdf, page 3"


def test_order_of_an_archive_is_that_of_a_folder():
    names = ["z/b.txt", "m.txt", "package.json", "z/README", "A.txt", "readme.md", "a/x.txt"]
    found = read("a.zip", samples.zipped(dict.fromkeys(names, "text\n")))
    expected = ["readme.md", "package.json", "A.txt", "m.txt", "a/x.txt", "z/README", "z/b.txt"]
    assert [document.name for document in found.documents] == [f"a.zip/{name}" for name in expected]
    for name in names:
        (Path("p") / name).parent.mkdir(parents=True, exist_ok=True)
        (Path("p") / name).write_text("text\n")
    assert [document.name for document in documents.read(["p"]).documents] == [f"p/{n}" for n in expected]


def test_pages_without_text_are_reported_and_empty_ones_are_not():
    found = read("a.pdf", samples.pdf([["one"], None, None, [], ["five"], None]))
    assert found.skips == [documents.Skip("a.pdf", "pages 2-3, 6 without text (pictures?)")]
    with pytest.raises(BadInput, match="a.pdf holds no text: page 1 without text .* ocrmypdf"):
        read("a.pdf", samples.pdf([None]))


def test_an_epub_2_book_has_its_chapters_from_the_ncx():
    files = {
        "mimetype": "application/epub+zip",
        "META-INF/container.xml": samples.CONTAINER.replace("OEBPS/", ""),
        "book.opf": '<package><manifest><item id="a" href="a%20b.html" media-type="application/xhtml+xml"/>'
        '<item id="n" href="toc.ncx" media-type="application/x-dtbncx+xml"/></manifest>'
        '<spine toc="n"><itemref idref="a"/><itemref idref="lost"/></spine></package>',
        "toc.ncx": "<ncx><navMap><navPoint><navLabel><text>The\n Oak</text></navLabel>"
        '<content src="a%20b.html"/><navPoint><navLabel><text>Pine</text></navLabel>'
        '<content src="a%20b.html#pine"/></navPoint></navPoint></navMap></ncx>',
        "a b.html": samples.chapter('<p>acorn</p><a id="pine"></a><p>cone</p>'),
    }
    (document,) = read("a.epub", samples.zipped(files)).documents
    assert document.text == "acorn\n\ncone\n"
    assert str(document.locate(0, 5)) == "a.epub, The Oak" and str(document.locate(7, 11)) == "a.epub, Pine"


def test_parts_of_a_book_that_cannot_be_read_are_reported():
    chapters = {"a.xhtml": samples.chapter("<p>acorn</p>"), "b.xhtml": "\0" * 99, "c.xhtml": "<p>cone</p>"}
    found = read("a.epub", samples.epub(chapters, "<p>&nbsp;<a", **{"OEBPS/nav.xhtml": "\0"}))
    assert found.documents[0].text == "acorn\n\ncone\n"
    assert [(skip.name, skip.reason) for skip in found.skips] == [
        ("a.epub, table of contents", "OEBPS/nav.xhtml: binary data"),
        ("a.epub, part 2", "OEBPS/text/b.xhtml: binary data"),
    ]


def test_a_strict_word_document():
    strict = samples.docx(samples.paragraph("heron") + samples.paragraph("ibis", "H1"))
    with zipfile.ZipFile(io.BytesIO(strict)) as archive:
        files = {name: archive.read(name).decode() for name in archive.namelist()}
    old, new = samples.WORD.split('"')[1], "http://purl.oclc.org/ooxml/wordprocessingml/main"
    files = {name: text.replace(old, new) for name, text in files.items()}
    (document,) = read("a.docx", samples.zipped(files)).documents
    assert document.text == "heron\n\nibis\n"
    assert str(document.locate(7, 11)) == "a.docx, paragraph 2 (ibis)"


GUTENBERG = """The Project Gutenberg eBook of Nuts

Title: Nuts
  and more

Author: A. Nut

Language: English

*** START OF THE PROJECT GUTENBERG EBOOK NUTS ***


CHAPTER 1
cashew

*** END OF THE PROJECT GUTENBERG EBOOK NUTS ***
licence
"""


def test_the_gutenberg_licence_is_dropped_but_not_title_and_author():
    (document,) = read("a.txt", GUTENBERG.encode()).documents
    assert document.text == "Title: Nuts\n  and more\n\nAuthor: A. Nut\n\nCHAPTER 1\ncashew\n\n"
    for word, line in {"Title": 3, "more": 4, "Author": 6, "CHAPTER": 13, "cashew": 14}.items():
        begin = document.text.index(word)
        assert str(document.locate(begin, begin + 1)) == f"a.txt:{line}"
    dropped = len(GUTENBERG) - len(document.text)
    assert document.notes == (f"boilerplate dropped: Project Gutenberg licence ({dropped} characters)",)
    (kept,) = read("a.txt", GUTENBERG.encode(), boilerplate="keep").documents
    assert kept.text == GUTENBERG and kept.notes[0].startswith("boilerplate kept: Project Gutenberg licence")
    with pytest.raises(UsageError):
        Options(boilerplate="maybe")


def test_a_program_that_quotes_the_licence_keeps_its_text():
    source = "# a comment\n" * 100 + f'LICENCE = """\n{GUTENBERG}"""\n'
    (document,) = read("a.py", source.encode()).documents
    assert document.text == source and document.notes == ()


def test_navigation_and_running_heads_are_dropped_or_kept():
    (page,) = read("a.html", samples.HTML.encode(), boilerplate="keep").documents
    assert "menu more" in page.text and page.text.endswith("imprint\n")
    pages = [["The Nut Book", f"nut {n} of many", "kernel", f"- {n} -"] for n in range(1, 6)]
    (dropped,) = read("a.pdf", samples.pdf(pages)).documents
    assert dropped.text == "\n\n".join(f"nut {n} of many\nkernel" for n in range(1, 6)) + "\n"
    begin = dropped.text.index("nut 4")
    location = dropped.locate(begin, begin + 5)
    assert (location.place, location.line) == ("page 4", 2)
    assert dropped.notes == ("boilerplate dropped: running heads (95 characters)",)
    (kept,) = read("a.pdf", samples.pdf(pages), boilerplate="keep").documents
    assert kept.text == "\n\n".join("\n".join(lines) for lines in pages) + "\n"


def test_what_is_nothing_but_boilerplate_is_kept():
    (document,) = read("a.html", b"<nav>only this</nav>").documents
    assert document.text == "only this\n"


def test_clutter_of_a_folder_is_skipped_with_its_reason():
    files = {
        "package-lock.json": "{}",
        "lib.min.js": "x",
        "app.js.map": "{}",
        "app.js": "var a=1;" * 1000,
        "pb.py": "# Generated by the protocol buffer compiler.  DO NOT EDIT!\n",
        "prose.md": "Files marked @generated are skipped.\n",
        "code.py": "x = 1\n",
    }
    Path("p").mkdir()
    for name, text in files.items():
        (Path("p") / name).write_text(text)
    found = documents.read(["p"])
    assert [document.name for document in found.documents] == ["p/code.py", "p/prose.md"]
    assert {Path(skip.name).name: skip.reason for skip in found.skips} == {
        "package-lock.json": "lock file",
        "lib.min.js": "minified",
        "app.js.map": "source map",
        "app.js": "minified",
        "pb.py": "generated, as it says itself",
    }
    assert len(documents.read(["p/app.js"]).documents) == 1  # named itself it is read


def test_include_exclude_and_longchatignore():
    names = ["a.py", "b.txt", "s/a.py", "s/deep/c.py", "s/deep/d.txt", "t/a.py"]
    for name in names:
        (Path("p") / name).parent.mkdir(parents=True, exist_ok=True)
        (Path("p") / name).write_text("text\n")
    archive = samples.zipped(dict.fromkeys(names, "text\n"))
    Path("a.zip").write_bytes(archive)

    def left(name="p", **options):
        found = documents.read([name], options=Options(**options))
        return [document.name.removeprefix(f"{name}/") for document in found.documents], found.ignored

    for name in ("p", "a.zip"):
        assert left(name, include=("*.py",), exclude=("t/",)) == (["a.py", "s/a.py", "s/deep/c.py"], 3)
        assert left(name, include=("/s/**/*.txt",)) == (["s/deep/d.txt"], 5)
    Path("p/.gitignore").write_text("*.txt\n")
    Path("p/.longchatignore").write_text("!d.txt\n/s/a.py\n.*ignore\n")
    assert left() == (["a.py", "s/deep/c.py", "s/deep/d.txt", "t/a.py"], 4)
