"""BM25 over the words of blocks (Robertson & Zaragoza, The Probabilistic Relevance Framework, 2009).

`score = sum over the question's words of idf * tf (k1 + 1) / (tf + k1 (1 - b + b length / mean length))`
with `idf = ln(1 + (N - df + 0.5) / (df + 0.5))`. Blocks are of nearly one length, so k1 and b matter little:
the customary 1.2 and 0.75.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from typing import Self

import numpy as np

K1 = 1.2
B = 0.75

# Scripts written without spaces (Thai to Khmer, kana, Han, Hangul) are indexed by pairs of characters.
_DENSE = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af"
_WORDS = re.compile(rf"[{_DENSE}]+|[^\W{_DENSE}]+(?:['’.\-_][^\W{_DENSE}]+)*")
_DENSE_RUN = re.compile(rf"[{_DENSE}]")
_JOINT = re.compile(r"['’.\-_]")
_MARKS = re.compile("[\u0300-\u036f]")


class Lexical:
    """Scores sentences by the words of their block and, half as much, by their own.

    The block says what the text is about, the sentence tells look-alikes in one block apart. Divided by the
    question's words times ln(1 + blocks), so that 1 means: nearly all words, and rare ones.
    """

    def __init__(self, sentences: Sequence[str], firsts: np.ndarray) -> None:
        """`firsts` int64 [blocks] is the first sentence of each block."""
        self._spans = np.diff(firsts, append=len(sentences))
        ends = firsts + self._spans
        self._blocks = BM25(" ".join(sentences[i:j]) for i, j in zip(firsts, ends, strict=True))
        self._sentences = BM25(sentences)

    def arrays(self) -> dict[str, np.ndarray]:
        """What `of` makes an equal one of."""
        indexes = {"blocks": self._blocks, "sentences": self._sentences}
        held = {f"{name}.{key}": x for name, index in indexes.items() for key, x in index.arrays().items()}
        return {"spans": self._spans, **held}

    @classmethod
    def of(cls, arrays: Mapping[str, np.ndarray]) -> Self:
        """From `arrays`."""
        made = cls.__new__(cls)
        made._spans = arrays["spans"]
        made._blocks, made._sentences = (
            BM25.of({key: arrays[f"{name}.{key}"] for key in BM25.KEPT}) for name in ("blocks", "sentences")
        )
        return made

    def score(self, question: str) -> np.ndarray:
        """Float32 [sentences]."""
        blocks = np.repeat(self._blocks.score(question), self._spans)
        asked = max(len(set(words(question))), 1)
        whole = 1.5 * asked * np.log1p(max(self._blocks.size, 1))
        return (blocks + 0.5 * self._sentences.score(question)) / np.float32(whole)


class BM25:
    """An index of blocks of text by their words.

    Holds one posting per (word, block): about 9 bytes per word of text.
    """

    def __init__(self, texts: Iterable[str]) -> None:
        self._terms: dict[str, int] = {}
        known: dict[str, tuple[int, ...]] = {}
        terms: list[int] = []
        lengths: list[int] = []
        for text in texts:
            before = len(terms)
            for word in words(text):
                if word not in known:
                    known[word] = self._learn(word)
                terms.extend(known[word])
            lengths.append(len(terms) - before)
        self.size = len(lengths)
        self._index(np.array(terms, dtype=np.int64), np.array(lengths, dtype=np.int64))

    KEPT = ("terms", "size", "first", "blocks", "impacts")

    def arrays(self) -> dict[str, np.ndarray]:
        """What `of` makes an equal one of."""
        terms = np.frombuffer("\0".join(self._terms).encode("utf-8", "surrogatepass"), np.uint8)
        values = (terms, np.array([self.size]), self._first, self._blocks, self._impacts)
        return dict(zip(self.KEPT, values, strict=True))

    @classmethod
    def of(cls, arrays: Mapping[str, np.ndarray]) -> Self:
        """From `arrays`."""
        made = cls.__new__(cls)
        text = arrays["terms"].tobytes().decode("utf-8", "surrogatepass")
        made._terms = {term: number for number, term in enumerate(text.split("\0") if text else ())}
        made.size = int(arrays["size"][0])
        made._first, made._blocks, made._impacts = (arrays[name] for name in ("first", "blocks", "impacts"))
        return made

    def score(self, question: str) -> np.ndarray:
        """BM25 of each block, float32 [blocks]."""
        scores = np.zeros(self.size, dtype=np.float32)
        for term in self._known(question):
            postings = slice(self._first[term], self._first[term + 1])
            scores[self._blocks[postings]] += self._impacts[postings]
        return scores

    def _known(self, question: str) -> list[int]:
        terms = {term for word in words(question) for term in parts(word)}
        return sorted(self._terms[term] for term in terms if term in self._terms)

    def _learn(self, word: str) -> tuple[int, ...]:
        return tuple(self._terms.setdefault(part, len(self._terms)) for part in parts(word))

    def _index(self, terms: np.ndarray, lengths: np.ndarray) -> None:
        blocks = np.repeat(np.arange(self.size), lengths)
        pairs, counts = np.unique(terms * max(self.size, 1) + blocks, return_counts=True)
        postings, self._blocks = np.divmod(pairs, max(self.size, 1))
        held = np.bincount(postings, minlength=len(self._terms))
        self._first = np.concatenate([[0], np.cumsum(held)])
        idf = np.log1p((self.size - held + 0.5) / (held + 0.5))
        norm = K1 * (1 - B + B * lengths / max(lengths.mean() if self.size else 1, 1e-9))
        impacts = counts * (K1 + 1) / (counts + norm[self._blocks])
        self._impacts = (impacts * idf[postings]).astype(np.float32)
        self._blocks = self._blocks.astype(np.int32)


def words(text: str) -> list[str]:
    """Words of `text`, case and accents folded; numbers, hyphenated and dotted words stay whole."""
    text = text.casefold()
    if not text.isascii():
        folded = _MARKS.sub("", unicodedata.normalize("NFKD", text))
        text = unicodedata.normalize("NFKC", folded)
    return _WORDS.findall(text)


def parts(word: str) -> tuple[str, ...]:
    """What a word is indexed as: its stem; a joined word also as its pieces; unspaced scripts by pairs."""
    if _DENSE_RUN.match(word):
        return tuple(word[i : i + 2] for i in range(max(len(word) - 1, 1)))
    if _JOINT.search(word):
        return (word, *(stem(piece) for piece in _JOINT.split(word) if len(piece) > 1))
    return (stem(word),)


def stem(word: str) -> str:
    """Plural and third-person endings cut (Harman's S-stemmer, 1991)."""
    if len(word) < 4 or word[-1] != "s" or word[-2:] in ("us", "ss"):
        return word
    if word.endswith("ies") and word[-4:-3] not in "ae":
        return word[:-3] + "y"
    return word[:-1]
