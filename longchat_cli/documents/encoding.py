"""Bytes to text: byte order mark, strict UTF-8, UTF-16/32 by zeros, then a detector. Never the locale."""

from __future__ import annotations

import codecs
import re
import unicodedata
from contextlib import suppress
from dataclasses import dataclass

from charset_normalizer import from_bytes

# UTF-32 first: its little-endian mark begins with the one of UTF-16.
_MARKS = (
    (codecs.BOM_UTF32_LE, "utf-32-le"),
    (codecs.BOM_UTF32_BE, "utf-32-be"),
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
)
_CONTROLS = bytes({*range(32), 127} - set(b"\t\n\v\f\r\x1b"))
_MAX_CONTROLS_UTF8 = 0.1
_MAX_CONTROLS_OTHER = 0.02
_SAMPLE = 1 << 16
_ASCII = re.compile(r"[\t\n\r -~]")

# What Western European prose is written with beyond ASCII; letters of Turkish, Icelandic and Slavic code
# pages (which share these bytes) are absent, so that such text goes to the detector.
_LETTERS = "ÀÁÂÃÄÅÆÇÈÉÊËÌÍÎÏÑÒÓÔÕÖØÙÚÛÜßàáâãäåæçèéêëìíîïñòóôõöøùúûüÿŒœŸªº"
_SIGNS = "\xa0¡¢£¤¥§¨©«¬\xad®¯°±²³´µ¶·¸¹»¼½¾¿×÷€‚„…†‡ˆ‰‹‘’“”•–—˜™›"
_NOT_WESTERN = re.compile(
    rf"[^\x00-\x7f{_LETTERS}{_SIGNS}]"
    rf"|[a-zß-ÿ][À-ÖØ-Þ](?![A-ZÀ-ÖØ-Þ])"
    rf"|[a-z{_LETTERS}][¡¢£¤¥¦§¨©«¬®¯±²³¶¸¹»¼½¾¿‚„†‡ˆ‰˜][a-z{_LETTERS}]"
)
_SEQUENCE = re.compile(rb"[\xc2-\xdf][\x80-\xbf]|[\xe0-\xef][\x80-\xbf]{2}|[\xf0-\xf4][\x80-\xbf]{3}")
# Small enough that the detector does not guess rare code pages; Western ones are recognised above.
# fmt: off
_DETECTABLE = [
    "cp1250", "iso8859_2", "cp1251", "koi8_r", "cp1253", "cp1254", "cp1255", "cp1256", "cp1257",
    "cp932", "euc_jp", "gb18030", "big5", "euc_kr", "cp850", "cp866", "mac_roman",
]
# fmt: on


class Undecodable(ValueError):
    """The bytes are not text in any encoding known here; the message says what they look like."""


@dataclass(frozen=True)
class Decoded:
    """`text` as decoded; `damaged` counts characters that could not be decoded and are U+FFFD now."""

    text: str
    encoding: str
    damaged: int = 0


def decode(data: bytes, declared: str = "") -> Decoded:
    """Decode a whole file; `declared` is the encoding its own text names, tried before any guess.

    Raises Undecodable for binary data and unknown encodings.
    """
    found = _by_mark(data) or _strict_utf8(data) or _as_declared(data, declared) or _by_zeros(data)
    if found:
        return found
    if _share(data, _CONTROLS) > _MAX_CONTROLS_OTHER:
        raise Undecodable("binary data")
    found = _damaged_utf8(data) or _western(data) or _detected(data) or _mostly_ascii(data)
    if not found:
        raise Undecodable("text in an unknown encoding, or binary data")
    return found


def _by_mark(data: bytes) -> Decoded | None:
    for mark, encoding in _MARKS:
        if data.startswith(mark):
            body = data[len(mark) :]
            text = body.decode(encoding.removesuffix("-sig"), "replace")
            damaged = text.count("\ufffd")
            if damaged * 100 <= len(text) and _plausible(text[:_SAMPLE], 0.9):
                return Decoded(text, encoding, damaged)
    return None


def _strict_utf8(data: bytes) -> Decoded | None:
    if _share(data, _CONTROLS) > _MAX_CONTROLS_UTF8:
        return None
    try:
        return Decoded(data.decode("utf-8"), "utf-8")
    except UnicodeDecodeError:
        return None


def _as_declared(data: bytes, declared: str) -> Decoded | None:
    with suppress(LookupError, UnicodeError):  # not the name of a text encoding, or not true
        return Decoded(data.decode(declared), codecs.lookup(declared).name) if declared else None
    return None


def _by_zeros(data: bytes) -> Decoded | None:
    """UTF-16 and UTF-32 without a mark: ASCII characters in them leave zeros on one side."""
    if b"\0" not in data:
        return None
    found = []
    for encoding in ("utf-32-le", "utf-32-be", "utf-16-le", "utf-16-be"):
        with suppress(UnicodeDecodeError):
            text = data.decode(encoding)
            ascii_share = len(_ASCII.findall(text)) / len(text)
            if (
                "\0" not in text
                and (ascii_share > 0.01 or "32" in encoding)
                and _plausible(text[:_SAMPLE], 0.99)
            ):
                found.append((ascii_share, Decoded(text, encoding)))
    best = max(found, key=lambda each: each[0], default=(0.0, None))[1]
    return best if best and not _is_paired_ascii(best.text[:_SAMPLE]) else None


def _is_paired_ascii(text: str) -> bool:
    """Single-byte text with a few NULs, taken for UTF-16: nearly every character is made of two letters."""
    pairs = sum(0x20 < ord(c) >> 8 < 0x7F and 0x20 <= ord(c) & 0xFF < 0x7F for c in text)
    return pairs > 0.85 * len(text)


def _damaged_utf8(data: bytes) -> Decoded | None:
    """UTF-8 with a few bad bytes, or cut inside a character: well-formed sequences far outnumber the bad."""
    good = sum(1 for _ in _SEQUENCE.finditer(data))
    text = data.decode("utf-8", "replace")
    damaged = text.count("\ufffd")
    return Decoded(text, "utf-8", damaged) if good > 3 * damaged else None


def _western(data: bytes) -> Decoded | None:
    """cp1252 (latin-1 where it needs no more), if its letters stand where Western languages put them."""
    try:
        text = data.decode("cp1252")
    except UnicodeDecodeError:
        return None
    high = _share(data, bytes(range(0xC0, 0x100)))
    ascii_letters = _share(data, b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ")
    if high > 0.4 * ascii_letters or _NOT_WESTERN.search(text):
        return None
    return Decoded(text, "cp1252" if re.search(rb"[\x80-\x9f]", data) else "latin-1")


def _detected(data: bytes) -> Decoded | None:
    first = re.search(rb"[\x80-\xff]", data)
    begin = max((first.start() if first else 0) - 1024, 0)
    sample = data[begin : begin + _SAMPLE]
    best = from_bytes(sample, cp_isolation=_DETECTABLE).best()
    if best is None:
        return None
    text = data.decode(best.encoding, "replace")
    return Decoded(text, best.encoding, text.count("\ufffd"))


def _mostly_ascii(data: bytes) -> Decoded | None:
    if _share(data, bytes(range(0x80, 0x100))) > 0.01:
        return None
    text = data.decode("utf-8", "replace")
    return Decoded(text, "utf-8", text.count("\ufffd"))


def _share(data: bytes, of: bytes) -> float:
    return (len(data) - len(data.translate(None, of))) / max(len(data), 1)


def _plausible(text: str, share: float) -> bool:
    """At least `share` of the characters are assigned and printable, or white space."""
    odd = sum(unicodedata.category(c) in {"Cc", "Cf", "Cn", "Co", "Cs"} and c not in "\t\n\r\f" for c in text)
    return odd <= (1 - share) * len(text)
