"""The finder for texts that come one by one, as the turns of a chat: each is cut and encoded once.

What the encoder made of them is kept, so that a chat that goes on encodes its last sentences alone.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from longchat_cli.pages import Store
from longchat_cli.recall.find import Finder, Scorer
from longchat_cli.recall.kept import NOTHING, OffsetTokenizer, Progress, Run, SentenceEncoder, Source, runs
from longchat_cli.recall.lexical import BM25, K1, B, Lexical, parts, words
from longchat_cli.recall.passages import Outline, asks


class GrowingFinder(Finder):
    """A `Finder` to which documents are added behind the others, and from which the last are taken back.

    A question is no evidence for another: sentences that ask are read beside others, and never found.
    `store`: where sentence vectors are kept.
    """

    def __init__(
        self,
        tokenizer: OffsetTokenizer,
        encoder: SentenceEncoder | None = None,
        store: Store | None = None,
    ) -> None:
        self.outlines: list[Outline] = []
        self.reused = 0
        self._tokenizer = tokenizer
        self._firsts, self._places = NOTHING, []
        self._lexical = GrowingLexical()
        self._semantic = GrowingSemantic(encoder, store) if encoder else None
        self.scorers: dict[str, Scorer] = {"lexical": self._lexical}
        if self._semantic:
            self.scorers["semantic"] = self._semantic

    def add(self, document: Source) -> None:
        outline = Outline.of(
            document.name, document.text, self._tokenizer.encode_with_offsets(document.text)[1]
        )
        sentences, firsts = _sentences(outline), outline.blocks[:-1]
        self._firsts = np.concatenate([self._firsts, self._lexical.sentences + firsts])
        self._places += [(len(self.outlines), block) for block in range(len(firsts))]
        self._lexical.add(sentences, np.diff(outline.blocks), _told(sentences))
        if self._semantic:
            self._semantic.add(sentences)
        self.outlines.append(outline)

    def encode(self, progress: Progress | None = None, cancel: Callable[[], bool] | None = None) -> bool:
        """Encode what was added; False when cancelled. Whoever ranks before that waits for it."""
        return self._semantic is None or self._semantic.encode(progress, cancel)

    def keep(self, count: int) -> None:
        """Only the first `count` documents."""
        del self.outlines[count:]
        sentences = sum(len(outline.sentences) for outline in self.outlines)
        blocks = sum(len(outline.blocks) - 1 for outline in self.outlines)
        self._firsts = self._firsts[:blocks]
        del self._places[blocks:]
        self._lexical.keep(sentences, blocks)
        if self._semantic:
            self._semantic.keep([s for outline in self.outlines for s in _sentences(outline)])


def _sentences(outline: Outline) -> list[str]:
    return [outline.text[i:j] for i, j in outline.sentences.tolist()]


def _told(sentences: Sequence[str]) -> np.ndarray:
    """Which of them do not ask, bool."""
    return np.array([not asks(sentence) for sentence in sentences], np.bool_)


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
    """`Semantic` of sentences that are added: a row of float16 each, in memory that doubles.

    Runs of them are found in `store` again, cut as those of a text are. The last one may go on, and is not
    kept yet.
    """

    def __init__(self, encoder: SentenceEncoder, store: Store | None = None) -> None:
        self.encoder, self._store = encoder, store
        self.size = 0
        self._vectors = np.zeros((64, encoder.width), dtype=np.float16)
        self._told = np.zeros(64, dtype=np.float32)
        self._last: list[str] = []  # the sentences of the last run
        self._new: list[str] = []  # behind them, not encoded

    def add(self, sentences: Sequence[str]) -> None:
        """More of them, which `encode` encodes."""
        self._new += sentences

    def encode(self, progress: Progress | None = None, cancel: Callable[[], bool] | None = None) -> bool:
        """Encode what is new, run by run; False when cancelled: it goes on from there the next time."""
        first, old = self.size - len(self._last), len(self._last)
        texts = [*self._last, *self._new]
        self._grow(first + len(texts))
        for run in runs(texts) if self._new else ():
            if cancel and cancel():
                return False
            rows = self._vectors[first + run.start : first + run.stop]
            self._fill(rows, texts[run], max(old - run.start, 0), run.stop < len(texts))
            self._told[first + run.start : first + run.stop] = _told(texts[run])
            self.size, self._last, self._new = first + run.stop, texts[run], texts[run.stop :]
            if progress:
                progress(run.stop, len(texts))
        return True

    def _fill(self, rows: np.ndarray, texts: list[str], old: int, whole: bool) -> None:
        """The vectors of a run, of which the first `old` are there; one that is `whole` is kept."""
        kept = Run(self._store, self.encoder, texts) if self._store and whole else None
        if kept and (known := kept.load()) is not None:
            rows[:] = known
            return
        if old < len(texts):
            rows[old:] = self.encoder.encode(texts[old:])
        if kept:
            kept.save(rows)

    def keep(self, sentences: Sequence[str]) -> None:
        """Only the first ones, which are `sentences`."""
        last = [*runs(sentences[: self.size])][-1:]
        self._new = [*sentences[self.size :]]
        self.size = len(sentences) - len(self._new)
        self._last = [text for run in last for text in sentences[run]]

    def score(self, question: str) -> np.ndarray:
        """Cosine of each sentence with the question, float32 [sentences]; 0 of those that ask."""
        self.encode()
        held = self._vectors[: self.size].astype(np.float32)
        return held @ self.encoder.encode([question])[0] * self._told[: self.size]

    def _grow(self, size: int) -> None:
        if size <= len(self._vectors):
            return
        more = 2 * size - len(self._vectors)
        self._vectors = np.concatenate([self._vectors, np.zeros((more, self.encoder.width), np.float16)])
        self._told = np.concatenate([self._told, np.zeros(more, np.float32)])
