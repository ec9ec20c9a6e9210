"""The finder for texts that come one by one, as the turns of a chat: each is cut and encoded once."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np

from longchat_cli.recall.find import Finder, Scorer
from longchat_cli.recall.kept import NOTHING, OffsetTokenizer, SentenceEncoder, Source
from longchat_cli.recall.lexical import BM25, K1, B, Lexical, parts, words
from longchat_cli.recall.passages import Outline

ASKS = ("?", "？", "؟")


class GrowingFinder(Finder):
    """A `Finder` to which documents are added behind the others, and from which the last are taken back.

    A question is no evidence for another: sentences that ask are read beside others, and never found.
    """

    def __init__(self, tokenizer: OffsetTokenizer, encoder: SentenceEncoder | None = None) -> None:
        self.outlines: list[Outline] = []
        self.reused = 0
        self._tokenizer = tokenizer
        self._firsts, self._places = NOTHING, []
        self._lexical = GrowingLexical()
        self._semantic = GrowingSemantic(encoder) if encoder else None
        self.scorers: dict[str, Scorer] = {"lexical": self._lexical}
        if self._semantic:
            self.scorers["semantic"] = self._semantic

    def add(self, document: Source) -> None:
        outline = Outline.of(
            document.name, document.text, self._tokenizer.encode_with_offsets(document.text)[1]
        )
        sentences = [outline.text[i:j] for i, j in outline.sentences.tolist()]
        firsts = outline.blocks[:-1]
        blocks = range(len(firsts))
        self._firsts = np.concatenate([self._firsts, self._lexical.sentences + firsts])
        self._places += [(len(self.outlines), block) for block in blocks]
        told = np.array([not sentence.rstrip("\"'”’»)").endswith(ASKS) for sentence in sentences])
        self._lexical.add(sentences, np.diff(outline.blocks), told)
        if self._semantic:
            self._semantic.add(sentences, told)
        self.outlines.append(outline)

    def keep(self, count: int) -> None:
        """Only the first `count` documents."""
        del self.outlines[count:]
        sentences = sum(len(outline.sentences) for outline in self.outlines)
        blocks = sum(len(outline.blocks) - 1 for outline in self.outlines)
        self._firsts = self._firsts[:blocks]
        del self._places[blocks:]
        self._lexical.keep(sentences, blocks)
        if self._semantic:
            self._semantic.size = sentences


class GrowingLexical(Lexical):
    """`Lexical` of blocks that are added."""

    def __init__(self) -> None:
        self._spans, self._told = NOTHING, NOTHING
        self._blocks: GrowingBM25 = GrowingBM25()
        self._sentences: GrowingBM25 = GrowingBM25()

    @property
    def sentences(self) -> int:
        """How many there are."""
        return self._sentences.size

    def add(self, sentences: Sequence[str], spans: np.ndarray, told: np.ndarray) -> None:
        """More `sentences`; `spans` int64 [blocks] of them are in each of their blocks.

        Where `told`, bool [sentences], is false the score is 0.
        """
        self._spans = np.concatenate([self._spans, spans])
        self._told = np.concatenate([self._told, told])
        ends = np.cumsum(spans).tolist()
        self._blocks.add(" ".join(sentences[i:j]) for i, j in zip([0, *ends], ends, strict=False))
        self._sentences.add(sentences)

    def keep(self, sentences: int, blocks: int) -> None:
        """Only the first ones."""
        self._spans, self._told = self._spans[:blocks], self._told[:sentences]
        self._blocks.keep(blocks)
        self._sentences.keep(sentences)

    def score(self, question: str) -> np.ndarray:
        return super().score(question) * self._told.astype(np.float32)


class GrowingBM25(BM25):
    """`BM25` by counts, so that a text can be added without looking at the others."""

    def __init__(self) -> None:
        self._postings: dict[str, tuple[array[int], array[int]]] = {}  # blocks with the word, how often
        self._lengths = array("i")
        self.size = 0

    def add(self, texts: Iterable[str]) -> None:
        for text in texts:
            counts = Counter(part for word in words(text) for part in parts(word))
            for term, count in counts.items():
                blocks, often = self._postings.setdefault(term, (array("i"), array("i")))
                blocks.append(self.size)
                often.append(count)
            self._lengths.append(counts.total())
            self.size += 1

    def keep(self, size: int) -> None:
        """Only the first `size` texts."""
        for blocks, often in self._postings.values():
            first = bisect_left(blocks, size)
            del blocks[first:], often[first:]
        del self._lengths[size:]
        self.size = size

    def score(self, question: str) -> np.ndarray:
        scores = np.zeros(self.size, dtype=np.float32)
        lengths = np.array(self._lengths)
        norm = K1 * (1 - B + B * lengths / max(lengths.mean() if self.size else 1, 1e-9))
        for term in sorted({term for word in words(question) for term in parts(word)}):
            held, often = (np.array(x) for x in self._postings.get(term, ((), ())))
            if len(held):
                idf = np.log1p((self.size - len(held) + 0.5) / (len(held) + 0.5))
                scores[held] += (idf * often * (K1 + 1) / (often + norm[held])).astype(np.float32)
        return scores


class GrowingSemantic:
    """`Semantic` of sentences that are added: a row of float16 each, in memory that doubles."""

    def __init__(self, encoder: SentenceEncoder) -> None:
        self.encoder = encoder
        self.size = 0
        self._vectors = np.zeros((64, encoder.width), dtype=np.float16)

    def add(self, sentences: Sequence[str], told: np.ndarray) -> None:
        """As `GrowingLexical.add`."""
        if not sentences:
            return
        end = self.size + len(sentences)
        if end > len(self._vectors):
            more = np.zeros((2 * end - len(self._vectors), self.encoder.width), dtype=np.float16)
            self._vectors = np.concatenate([self._vectors, more])
        self._vectors[self.size : end] = self.encoder.encode(sentences) * told[:, None]
        self.size = end

    def score(self, question: str) -> np.ndarray:
        """Cosine of each sentence with the question, float32 [sentences]."""
        return self._vectors[: self.size].astype(np.float32) @ self.encoder.encode([question])[0]
