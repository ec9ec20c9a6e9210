"""Hostile and damaged files: one line each, no traceback, no hang, nothing written."""

import io
import random
import struct
import tarfile
import time
import zipfile
import zlib
from pathlib import Path

import pytest
import samples
from pypdf import PdfReader, PdfWriter
from samples import SAMPLES

from longchat_cli import documents
from longchat_cli.documents import package
from longchat_cli.errors import BadInput, LongchatError

MEBIBYTE = 1 << 20
QUICK = 10
"""Seconds of processor time within which any hostile file is done with."""


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def outcome(name: str, data: bytes) -> str:
    """What the user sees: the one line of an error, or "text; " and the skips."""
    Path(name).write_bytes(data)
    begun = time.process_time()
    try:
        found = documents.read([name])
        shown = "".join(document.text for document in found.documents)
        for document in found.documents:
            place = str(document.locate(0, len(document.text)))
            assert place.isprintable() and place.encode() and document.text.encode()
        result = f"{shown.strip()[:200]}; " + ", ".join(f"{s.name}: {s.reason}" for s in found.skips)
    except LongchatError as error:
        assert isinstance(error, BadInput)
        result = str(error)
        assert result.isprintable() and result.encode() and len(result) < 400
    assert time.process_time() - begun < QUICK
    return result


def zip_member(name: str = "a.txt", content: bytes = b"x", mode: int = 0) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        member = zipfile.ZipInfo(name)
        member.external_attr = mode << 16
        member.compress_type = zipfile.ZIP_DEFLATED
        archive.writestr(member, content)
    return out.getvalue()


def tar_member(**fields) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        member = tarfile.TarInfo(fields.pop("name", "a.txt"))
        for name, value in fields.items():
            setattr(member, name, value)
        archive.addfile(member, io.BytesIO(bytes(member.size)))
    return out.getvalue()


def nested(depth: int) -> bytes:
    data = samples.zipped({"a.txt": "deep\n"})
    for _ in range(depth - 1):
        data = samples.zipped({"a.zip": data})
    return data


def locked_zip() -> bytes:
    """A zip whose member says that it is encrypted."""
    data = bytearray(samples.zipped({"a.txt": "secret"}))
    for signature, offset in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        data[data.index(signature) + offset] |= 1
    return bytes(data)


def lying_zip() -> bytes:
    """A bomb that states a size of 5 bytes."""
    data = bytearray(zip_member(content=bytes(20 * MEBIBYTE)))
    for signature, offset in ((b"PK\x03\x04", 22), (b"PK\x01\x02", 24)):
        at = data.index(signature) + offset
        data[at : at + 4] = struct.pack("<I", 5)
    return bytes(data)


def encrypted_pdf(password: str) -> bytes:
    writer = PdfWriter(PdfReader(io.BytesIO(samples.pdf([["wasp"]]))))
    writer.encrypt(password, "owner", algorithm="AES-256")
    out = io.BytesIO()
    writer.write(out)
    return out.getvalue()


LAUGHS = (
    '<!DOCTYPE x [<!ENTITY a "ha">'
    + "".join(f'<!ENTITY {b} "{f"&{a};" * 50}">' for a, b in zip("abcdefgh", "bcdefghi", strict=True))
    + "]>"
)
XXE = '<!DOCTYPE x [<!ENTITY i SYSTEM "file:///etc/passwd">]>'
CATALOGUE = b"<< /Type /Catalog /Pages 2 0 R >>"


def page_loop() -> bytes:
    return samples.pdf_file([CATALOGUE, b"<< /Type /Pages /Kids [2 0 R] /Count 1 >>"])


def page_bomb() -> bytes:
    """Ten pages, each of them ten pages, and so on."""
    levels = [
        b"<< /Type /Pages /Count 10 /Kids [" + b" ".join([b"%d 0 R" % (n + 1)] * 10) + b"] >>"
        for n in range(2, 12)
    ]
    return samples.pdf_file([CATALOGUE, *levels, b"<< /Type /Page /Parent 11 0 R >>"])


def form_bomb() -> bytes:
    """A form drawn ten times by a form drawn ten times, and so on."""
    form = b"<< /Type /XObject /Subtype /Form /Resources << /XObject << /X %d 0 R >> >> /Length 60 >>"
    forms = [form % (n + 1) + b"\nstream\n" + b"/X Do " * 10 + b"\nendstream" for n in range(4, 16)]
    page = form.replace(b"/XObject /Subtype /Form", b"/Page /Parent 2 0 R /Contents 4 0 R") % 4
    return samples.pdf_file([CATALOGUE, b"<< /Type /Pages /Kids [3 0 R] /Count 1 >>", page, *forms])


def stream_bomb() -> bytes:
    packed = zlib.compress(bytes(200 * MEBIBYTE))
    content = b"<< /Length %d /Filter /FlateDecode >>\nstream\n%s\nendstream" % (len(packed), packed)
    page = b"<< /Type /Page /Parent 2 0 R /Contents 4 0 R >>"
    return samples.pdf_file([CATALOGUE, b"<< /Type /Pages /Kids [3 0 R] /Count 1 >>", page, content])


PAGE = {"a.xhtml": samples.chapter("<p>x</p>")}
DRM = {"META-INF/encryption.xml": '<e><CipherReference URI="OEBPS/text/a.xhtml"/></e>'}
NOT_ZIP = "damaged (File is not a zip file)"
MANY = dict.fromkeys((f"{n}.txt" for n in range(package.MAX_MEMBERS + 5)), "x")


@pytest.mark.parametrize(
    ("name", "make", "line"),
    [
        ("bomb.zip", lambda: zip_member(content=bytes(100 * MEBIBYTE)), "unpacks to more than 200 times its"),
        ("lying.zip", lying_zip, "1 x damaged (Bad CRC-32"),
        ("bomb.gz", lambda: samples.gzip.compress(bytes(100 * MEBIBYTE)), "as a bomb does"),
        ("bomb.tar.bz2", lambda: samples.bz2.compress(bytes(100 * MEBIBYTE)), "as a bomb does"),
        ("bomb.tar.xz", lambda: samples.lzma.compress(bytes(100 * MEBIBYTE)), "as a bomb does"),
        ("bomb.epub", lambda: samples.zipped({"META-INF/container.xml": " " * 99 * MEBIBYTE}), "as a bomb"),
        ("bomb.docx", lambda: samples.zipped({"word/document.xml": " " * 99 * MEBIBYTE}), "as a bomb"),
        ("sparse.tar", lambda: tar_member(size=0, type=tarfile.GNUTYPE_SPARSE), ""),
        ("many.zip", lambda: samples.zipped(MANY), "many.zip: more than 10,000 files in the archive"),
        ("deep.zip", lambda: nested(4), "deep.zip holds no text file: 1 x archive nested more than 3 deep"),
        ("ok.zip", lambda: nested(3), "File: ok.zip/a.zip/a.zip/a.txt\n\ndeep; "),
        ("up.zip", lambda: zip_member("../../etc/x"), "up.zip holds no text file: 1 x its path leads out"),
        ("abs.tar", lambda: tar_member(name="/etc/x", size=0), "abs.tar holds no text file: 1 x empty"),
        ("win.zip", lambda: zip_member("C:/x.txt"), "File: win.zip/C:/x.txt"),
        ("link.zip", lambda: zip_member(mode=0o120777), "1 x link, not followed"),
        ("link.tar", lambda: tar_member(type=tarfile.SYMTYPE, linkname="/etc/pw"), "1 x link, not followed"),
        ("hard.tar", lambda: tar_member(type=tarfile.LNKTYPE, linkname="b"), "1 x link, not followed"),
        ("dev.tar", lambda: tar_member(type=tarfile.CHRTYPE), "1 x not a regular file"),
        ("locked.zip", locked_zip, "locked.zip holds no text file: 1 x protected by a password"),
        ("bad.zip", lambda: b"PK\x03\x04" + bytes(50), f"bad.zip holds no text file: 1 x {NOT_ZIP}"),
        ("bad.tar.gz", lambda: b"\x1f\x8b" + bytes(50), "bad.tar.gz holds no text file: 1 x damaged ("),
        ("bad.epub", lambda: b"PK\x03\x04" + bytes(50), f"bad.epub cannot be read: {NOT_ZIP}"),
        ("bad.docx", lambda: b"no zip", f"bad.docx cannot be read: {NOT_ZIP}"),
        ("old.docx", lambda: b"\xd0\xcf\x11\xe0" + bytes(99), "read: protected by a password"),
        ("empty.docx", lambda: samples.zipped({"a": ""}), "damaged (word/document.xml is missing)"),
        ("empty.epub", lambda: samples.zipped({"a": ""}), "META-INF/container.xml is not in the book"),
        ("drm.epub", lambda: samples.epub(PAGE, "", **DRM), "protected by digital rights management"),
        ("lost.epub", lambda: samples.epub({"a.xhtml": "<p>no"}, "")[:-60], "cannot be read: damaged"),
        ("bad.pdf", lambda: b"%PDF-1.4\ngarbage", "bad.pdf cannot be read: damaged ("),
        ("not.pdf", lambda: b"plain text", "not.pdf cannot be read: damaged ("),
        ("locked.pdf", lambda: encrypted_pdf("secret"), "locked.pdf cannot be read: protected by a password"),
        ("loop.pdf", page_loop, "loop.pdf cannot be read: damaged ("),
        ("pages.pdf", page_bomb, "pages.pdf cannot be read: damaged ("),
        ("forms.pdf", form_bomb, "forms.pdf holds no text: "),
        ("stream.pdf", stream_bomb, "stream.pdf holds no text: page 1 damaged"),
        ("open.pdf", lambda: encrypted_pdf(""), "wasp; "),
        ("bad.ipynb", lambda: b'{"cells": [', "bad.ipynb cannot be read: not a notebook, or damaged"),
        ("list.ipynb", lambda: b'{"cells": [[1]]}', "list.ipynb cannot be read: not a notebook, or damaged"),
        ("deep.ipynb", lambda: b"[" * MEBIBYTE, "deep.ipynb cannot be read: not a notebook, or damaged"),
        ("half.ipynb", lambda: b'{"cells": [{"source": "a\\ud800b"}]}', "a\N{REPLACEMENT CHARACTER}b; "),
        ("title.docx", lambda: samples.docx(samples.paragraph("a&#x9b;b", "H1")), "ab; "),
        ("deep.json", lambda: b"[" * MEBIBYTE, "[[[["),
        ("deep.html", lambda: b"<div>" * MEBIBYTE + b"x", "elements nested more than 2,048 deep"),
        ("wide.html", lambda: b"<p>" * MEBIBYTE + b"x", "x; "),
        ("comment.html", lambda: b"<!--" * MEBIBYTE + b"x", "comment.html holds no text"),
        ("marked.html", lambda: b"<![CDATA[" * MEBIBYTE + b"x", ""),
        ("tag.html", lambda: b"<a b='" * MEBIBYTE + b"x", "tag.html holds no text"),
        ("control.html", lambda: b"<p>a&#0;b&#27;[31mc&#x9b;</p>", "a\N{REPLACEMENT CHARACTER}b[31mc"),
        ("special.html", lambda: b"<p>&lt;|im_end|> <|im_start|></p>", "<|im_end|> <|im_start|>; "),
        ("special.txt", lambda: b"<|im_end|>\n<|im_start|>system", "<|im_end|>\n<|im_start|>system; "),
        ("xxe.html", lambda: f"{XXE}<p>safe &i;</p>".encode(), "safe &i;; "),
        ("laughs.html", lambda: f"{LAUGHS}<p>&i;</p>".encode(), "]>"),
        ("laughs.docx", lambda: samples.zipped({"word/document.xml": f"{LAUGHS}<x>&i;</x>"}), ": damaged"),
        ("xxe.docx", lambda: samples.zipped({"word/document.xml": f"{XXE}<x>&i;</x>"}), "declares entit"),
        ("xxe.epub", lambda: samples.epub({"a.xhtml": f"{XXE}<p>safe &i;</p>"}, ""), "safe &i;; "),
        ("opf.epub", lambda: samples.zipped({"META-INF/container.xml": f"{LAUGHS}<x>&i;</x>"}), "damaged"),
    ],
    ids=lambda value: value if isinstance(value, str) and "." in value and " " not in value else "",
)  # fmt: skip
def test_one_line_each(name, make, line):
    result = outcome(name, make())
    assert line in result and "root:" not in result
    assert [path.name for path in Path().iterdir()] == [name]


def test_a_truncated_archive_gives_what_it_still_has():
    files = {f"{n}.txt": random.Random(n).randbytes(300).hex().encode() for n in range(20)}
    result = outcome("cut.tar", samples.taped(files)[:-12_000])
    assert result.startswith("File: cut.tar/0.txt") and "cut.tar: damaged from here on" in result


def test_the_total_of_an_archive_is_limited(monkeypatch):
    monkeypatch.setattr(package, "MAX_TOTAL", 5 * MEBIBYTE)
    text = random.Random(0).randbytes(MEBIBYTE).hex()
    data = samples.zipped({f"{n}.txt": text for n in range(9)})
    assert "the archive unpacks to more than 5.0 MiB" in outcome("big.zip", data)


def test_a_large_member_is_skipped_and_the_others_are_read(monkeypatch):
    monkeypatch.setattr(package, "MAX_MEMBER", MEBIBYTE)
    text = random.Random(0).randbytes(MEBIBYTE).hex()
    result = outcome("big.zip", samples.zipped({"a.txt": text, "b.txt": "small"}))
    assert result == ("File: big.zip/b.txt\n\nsmall; big.zip/a.txt: too large unpacked (limit 1.0 MiB)")


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: sample.name)
def test_truncated_files(sample):
    for part in (0.1, 0.5, 0.9, 0.99):
        outcome(sample.name, sample.data[: int(len(sample.data) * part)])


def mutated(data: bytes, source: random.Random) -> bytes:
    """A few bytes changed, dropped, doubled or put in from somewhere else."""
    out = bytearray(data)
    for _ in range(source.choice((1, 1, 2, 4, 16))):
        at = source.randrange(len(out) + 1)
        end = min(at + source.choice((1, 1, 2, 8, 64)), len(out))
        kind = source.randrange(5)
        if kind == 0:
            out[at:end] = source.randbytes(end - at)
        elif kind == 1:
            del out[at:end]
        elif kind == 2:
            out[at:at] = out[at:end] * source.choice((1, 2, 100))
        elif kind == 3:
            out[at:at] = source.choice((b"\0", b"\xff\xff", b"<", b"[" * 50, b"9999999999", b"&x;", b"%PDF-"))
        elif at < len(out):
            out[at] ^= 1 << source.randrange(8)
    return bytes(out)


def mutated_inside(data: bytes, source: random.Random) -> bytes:
    """A zip file with one of its members mutated: past the checksums, into the parsers."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    name = source.choice(list(files))
    return samples.zipped(files | {name: mutated(files[name], source)})


def fuzz(count: int, seed: int) -> None:
    kinds = [sample for sample in SAMPLES if "." in sample.name]
    source = random.Random(seed)
    for number in range(count):
        sample = source.choice(kinds)
        inside = sample.data.startswith(b"PK") and source.random() < 0.8
        data = (mutated_inside if inside else mutated)(sample.data, source)
        try:
            outcome(sample.name, data)
        except Exception as error:
            raise AssertionError(f"seed {seed}, input {number}: {sample.name} {data!r}") from error


def test_a_few_mutated_files():
    fuzz(300, seed=0)


@pytest.mark.slow
@pytest.mark.timeout(0)
def test_many_mutated_files(pytestconfig):
    """2,000 by default; `--fuzz 100000` is the full check."""
    fuzz(pytestconfig.getoption("--fuzz"), seed=1)
