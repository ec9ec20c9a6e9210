"""The finder of `recall`: sentences, blocks and passages, words, the encoder, fusion."""

from __future__ import annotations

import json
import math
import re
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from longchat_cli.errors import BadInput, MissingInput, UsageError
from longchat_cli.pages import Store
from longchat_cli.recall import lexical
from longchat_cli.recall.find import Finder
from longchat_cli.recall.kept import outlines
from longchat_cli.recall.lexical import BM25, Lexical, parts, stem, words
from longchat_cli.recall.passages import (
    LONGEST,
    Outline,
    Passage,
    ReadingPlan,
    around,
    asks,
    choose,
    merge,
    split_sentences,
    with_neighbours,
)
from longchat_cli.recall.semantic import Encoder

FILLER = "The sea was calm that day. A gull sat upon the mast. Nobody on deck said a word to his neighbour. "


@dataclass(frozen=True)
class Doc:
    name: str
    text: str


class WordTokenizer:
    """A token is a word or a mark with the space before it, as in byte-level BPE."""

    def encode(self, text: str) -> list[int]:
        return self.encode_with_offsets(text)[0]

    def encode_with_offsets(self, text: str) -> tuple[list[int], list[int]]:
        found = list(re.finditer(r"\s*(?:\w+|[^\w\s])", text))
        return [sum(map(ord, m[0])) for m in found], [m.start() for m in found]


def outline(text: str, block_tokens: int = 64) -> Outline:
    return Outline.of("doc", text, WordTokenizer().encode_with_offsets(text)[1], block_tokens)


def sentences(text: str) -> list[str]:
    return [text[begin:end] for begin, end in split_sentences(text)[0].tolist()]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("One. Two? Three! Four", ["One.", "Two?", "Three!", "Four"]),
        ("Mr. Smith met Dr. J. R. Hale at 3.5 p.m. today. He left.", 2),
        ("“Stop!” he cried. “Never.” She left.", ["“Stop!” he cried.", "“Never.”", "She left."]),
        ("He paused... and went on. Then (see fig. 3) he sat.", 2),
        ("He said no. Then I. The end.", ["He said no.", "Then I.", "The end."]),
        ("你好。「再见！」他说。完", ["你好。", "「再见！」", "他说。", "完"]),
        ("Title\n\nBody one.\r\n\r\nBody two.", ["Title", "Body one.", "Body two."]),
        ("def f(x):\n    return x + 1\n\nf(2)", ["def f(x):", "return x + 1", "f(2)"]),
        ("12:00 started the server\n12:01 ok\n12:02 stopped it", 3),
        ("", []),
        (" \n\t\n ", []),
    ],
)
def test_sentences(text: str, expected: list[str] | int) -> None:
    found = sentences(text)
    assert (len(found) if isinstance(expected, int) else found) == expected


def test_lines_of_wrapped_prose_are_joined() -> None:
    text = (
        "This is a line of wrapped prose that goes on for a while and\n"
        "then wraps again at about the same width as it did before so\n"
        "that it ends here. And one more.\n"
    )
    assert [s.replace("\n", " ") for s in sentences(text)] == [
        "This is a line of wrapped prose that goes on for a while and then wraps again at about "
        "the same width as it did before so that it ends here.",
        "And one more.",
    ]


@given(st.text(alphabet='aB.!?。」" \n\r\t-;,é中', max_size=1500))
def test_sentences_cover_all_but_white_space_once(text: str) -> None:
    bounds, paragraphs = split_sentences(text)
    covered = np.zeros(len(text), dtype=int)
    for begin, end in bounds.tolist():
        assert 0 < end - begin <= LONGEST
        covered[begin:end] += 1
    assert all(n == 1 or (n == 0 and c.isspace()) for n, c in zip(covered, text, strict=True))
    assert (np.diff(bounds[:, 0]) > 0).all() and (np.diff(paragraphs) >= 0).all()


@pytest.mark.parametrize("unit", ["a", ".", "x y. ", "\n", " ", "a b\n", '"', "。"])
def test_splitting_is_linear_in_hostile_text(unit: str) -> None:
    start = time.process_time()
    split_sentences(unit * (1_000_000 // len(unit)))
    assert time.process_time() - start < 10  # a quadratic scan takes minutes


def test_blocks_are_whole_sentences_of_about_64_tokens() -> None:
    text = FILLER * 30 + "Word " * 75 + "end."
    cut = outline(text)
    assert cut.blocks[0] == 0 and cut.blocks[-1] == len(cut.sentences)
    sizes = [cut.count(*cut.block_range(block)) for block in range(len(cut.blocks) - 1)]
    assert max(sizes[:-1]) <= 64 and min(sizes[:-2]) > 32
    assert sizes[-1] > 64  # one long sentence alone


def test_a_block_ends_with_its_paragraph() -> None:
    text = (FILLER * 2 + "\n\n") * 4
    cut = outline(text)
    assert [text[cut.block_range(b)[0] :][:11] for b in range(len(cut.blocks) - 1)] == ["The sea was"] * 4


def test_grow_takes_whole_sentences_near_the_margin() -> None:
    text = FILLER * 20
    cut = outline(text)
    begin, end = cut.sentences[30].tolist()
    assert cut.grow(begin, end, 0) == (begin, end)
    low, high = cut.grow(begin, end, 32)
    assert low in cut.sentences[:, 0] and high in cut.sentences[:, 1]
    for grown in (cut.count(low, begin), cut.count(end, high)):
        assert 32 - 6 <= grown <= 32 + 6
    assert cut.grow(0, len(text), 10_000) == (0, len(text))
    assert cut.grow(*cut.sentences[0].tolist(), 10_000) == (0, int(cut.sentences[-1, 1]))


def test_choose_keeps_to_the_budget_and_the_order() -> None:
    text = FILLER * 40
    cut = outline(text)
    ranges = [cut.block_range(block) for block in (9, 2, 5)]
    ranked = [Passage(0, "doc", *r, 1.0 - i, (r[1] - 10, r[1])) for i, r in enumerate(ranges)]

    def begins(plan: ReadingPlan, budget: int = 1000) -> list[int]:
        return [p.begin for p in choose(ranked, [cut], plan, budget)]

    nine, two, five = (r[0] for r in ranges)
    assert begins(ReadingPlan(3, 0)) == [two, five, nine]
    assert begins(ReadingPlan(3, 0, "best first")) == [nine, two, five]
    assert begins(ReadingPlan(3, 0, "best last")) == [five, two, nine]
    assert begins(ReadingPlan(1, 0)) == [nine]
    assert begins(ReadingPlan(3, 0), budget=150) == [two, nine]
    for budget in (1, 7, 20, 100):
        for plan in (ReadingPlan(), ReadingPlan(3, 64)):
            read = choose(ranked, [cut], plan, budget)
            assert 0 < sum(cut.count(p.begin, p.end) for p in read) <= budget
    (cramped,) = choose(ranked, [cut], ReadingPlan(), 20)
    assert cramped.begin <= ranked[0].focus[0] and cramped.end >= ranked[0].focus[1]


def test_passages_that_touch_become_one_with_the_better_score() -> None:
    one = Passage(0, "a", 0, 50, 0.4, (0, 10), {"lexical": 0.4})
    two = Passage(0, "a", 40, 90, 0.9, (60, 70), {"lexical": 0.9})
    other = Passage(1, "b", 45, 60, 0.5, (45, 60))
    best, second = merge([one, other, two])
    assert (best.begin, best.end, best.score, best.focus) == (0, 90, 0.9, (60, 70))
    assert second is other


def test_bm25_is_the_formula() -> None:
    texts = ["red fox red", "a fox", "blue whale swims far away from red"]
    lengths = [len(text.split()) for text in texts]
    k1, b, mean = lexical.K1, lexical.B, sum(lengths) / 3
    expected = []
    for text, length in zip(texts, lengths, strict=True):
        score = 0.0
        for word in ("red", "fox"):
            df = sum(word in other.split() for other in texts)
            tf = text.split().count(word)
            idf = math.log(1 + (3 - df + 0.5) / (df + 0.5))
            score += idf * tf * (k1 + 1) / (tf + k1 * (1 - b + b * length / mean))
        expected.append(score)
    np.testing.assert_allclose(BM25(texts).score("red fox unseen red"), expected, rtol=1e-6)


def test_words_are_folded_and_joined_words_also_split() -> None:
    assert words("Röntgen's X-ray, 3.14 STRASSE straße") == [
        "rontgen's",
        "x-ray",
        "3.14",
        "strasse",
        "strasse",
    ]
    assert parts("deep-rivers") == ("deep-rivers", "deep", "river")
    assert parts("東京都") == ("東京", "京都") and parts("本") == ("本",)
    assert [stem(w) for w in ("cities", "numbers", "glass", "bus", "is")] == [
        "city",
        "number",
        "glass",
        "bus",
        "is",
    ]


def test_words_find_unspaced_scripts_and_accents() -> None:
    index = BM25(["他住在东京的大学旁边", "我喜欢北京烤鸭", "Der Arzt hieß Röntgen", "nothing here"])
    assert index.score("北京有什么").argmax() == 1
    assert index.score("rontgen").argmax() == 2
    assert not index.score("").any() and not index.score("zzz ???").any()


def test_the_indexes_of_nothing_are_empty() -> None:
    assert BM25([]).score("word").shape == (0,)
    assert Lexical([], np.zeros(0, np.int64)).score("word").shape == (0,)
    assert Finder([], WordTokenizer()).rank("word") == []
    assert (
        Finder([Doc("empty", ""), Doc("blank", " \n")], WordTokenizer()).read("word", 100, ReadingPlan())
        == []
    )


KEYS = ["river", "stone", "cloud", "lamp", "horse", "grey-owl", "grey-fox", "window", "mouse", "candle"]


@pytest.mark.parametrize("together", [True, False])
def test_the_right_key_is_first_among_look_alikes(together: bool) -> None:
    facts = [f"One of the special magic numbers for {key} is: {4152600 + i}." for i, key in enumerate(KEYS)]
    text = FILLER * 30 + (" " if together else " " + FILLER * 4).join(facts) + " " + FILLER * 30
    finder = Finder([Doc("book", text)], WordTokenizer())
    for i, key in enumerate(KEYS):
        best, *_ = finder.rank(f"What is the special magic number for {key} mentioned in the text?")
        assert text[slice(*best.focus)].endswith(f"{4152600 + i}."), key
        assert best.begin <= best.focus[0] and best.focus[1] <= best.end


class TwinEncoder:
    """Stands in for the encoder: texts are alike if they are about the same thing, said in any words."""

    THINGS = ({"dog", "hound", "terrier"}, {"boat", "ship", "ferry"}, {"sea", "mast", "deck"})
    identity, width = "twins", 4
    encoded = 0

    def encode(self, texts: list[str]) -> np.ndarray:
        self.encoded += len(texts)
        rows = [[0.2, *(float(bool(set(words(text)) & thing)) for thing in self.THINGS)] for text in texts]
        return np.array([np.array(row) / np.linalg.norm(row) for row in rows], dtype=np.float32)


def finder_over_two_documents(**given: object) -> Finder:
    hound = Doc("b.txt", "Intro line.\n\n" + FILLER * 9 + "Old Rex, a hound, limps. " + FILLER * 9)
    return Finder([Doc("a.txt", FILLER * 20), hound], WordTokenizer(), **given)  # type: ignore[arg-type]


def test_meaning_finds_what_words_do_not() -> None:
    finder = finder_over_two_documents(encoder=TwinEncoder())
    for by in ("semantic", "fused"):
        best = finder.rank("Which terrier?", 3, by)[0]  # type: ignore[arg-type]
        assert (best.document, best.source) == (1, "b.txt")
        assert finder.outlines[1].text[slice(*best.focus)] == "Old Rex, a hound, limps."
        assert best.parts["semantic"] == pytest.approx(1.0, abs=1e-3)  # kept as float16
    assert len(finder.rank("Which terrier?", 3)) == 3
    assert finder.rank("Which terrier?", 1, "lexical")[0].score == 0


@pytest.mark.parametrize(
    ("scores", "focus", "most", "expected"),
    [
        ([0, 0, 9, 0, 0], 2, 99, (2, 3)),
        ([0, 5, 9, 5, 5], 2, 99, (1, 5)),
        ([5, 0, 9, 0, 5], 2, 99, (0, 5)),  # a single lower one between
        ([5, 0, 0, 9, 5], 3, 99, (3, 5)),  # two are a gap
        ([5, 5, 9, 5, 5], 2, 30, (0, 3)),  # ten tokens each
        ([5, 5, 9, 5, 5], 2, 5, (2, 3)),
        ([9], 0, 99, (0, 1)),
    ],
)
def test_a_passage_grows_over_what_is_about_the_question(
    scores: list[float], focus: int, most: int, expected: tuple[int, int]
) -> None:
    sizes = np.full(len(scores), 10)
    assert around(np.array(scores, dtype=np.float32), focus, sizes, 4.0, most) == expected


def test_what_is_read_is_what_stands_out() -> None:
    told = "The ferry leaves at noon. Its captain is Jan. The ship is old."
    text = FILLER * 20 + told + " " + FILLER * 20 + "A boat sank once. " + FILLER * 9
    finder = Finder([Doc("a", "Only words."), Doc("b", text)], WordTokenizer(), TwinEncoder())  # type: ignore[arg-type]
    best, second, *rest = finder.passages("Which boat?", 5)
    assert {finder.outlines[1].text[p.begin : p.end] for p in (best, second)} == {told, "A boat sank once."}
    for one, other in pairwise(sorted([best, second, *rest], key=lambda p: (p.document, p.begin))):
        assert one.document < other.document or not other.begin <= one.focus[0] < other.end
    (read,) = finder.read("Which boat?", 1000, ReadingPlan())
    assert (read.begin, read.end) == (best.begin, best.end)
    (wider,) = finder.read("Which boat?", 1000, ReadingPlan(margin=20))
    assert wider.begin < best.begin and wider.end > best.end
    assert Finder([], WordTokenizer()).passages("word") == []


def test_a_name_in_the_text_beats_a_likeness() -> None:
    text = "The hound Bello slept. " + FILLER * 9 + "The thing KX-4821 slept. " + FILLER * 9
    finder = Finder([Doc("a", text)], WordTokenizer(), TwinEncoder())  # type: ignore[arg-type]
    assert "KX-4821" in text[slice(*finder.rank("KX-4821?", 1, "lexical")[0].focus)]
    assert "Bello" in text[slice(*finder.rank("dog", 1)[0].focus)]
    assert "KX-4821" in text[slice(*finder.rank("KX-4821?", 1)[0].focus)]


def test_vectors_are_kept_and_used_again(tmp_path: Path) -> None:
    first = finder_over_two_documents(encoder=TwinEncoder(), store=Store(tmp_path / "pages"))
    encoder = TwinEncoder()
    again = finder_over_two_documents(encoder=encoder, store=Store(tmp_path / "pages"))
    assert encoder.encoded == 0
    assert (first.reused, again.reused) == (0, sum(len(outline.tokens) for outline in again.outlines))
    assert again.rank("Which terrier?") == first.rank("Which terrier?")


def test_outlines_and_words_are_kept_and_used_again(tmp_path: Path) -> None:
    class Once(WordTokenizer):
        used = 0

        def encode_with_offsets(self, text: str) -> tuple[list[int], list[int]]:
            self.used += 1
            return super().encode_with_offsets(text)

    documents = [
        Doc("a", FILLER * 9),
        Doc("empty", ""),
        Doc("b", "Old Rex, a hound.\n\n" + FILLER),
        Doc("c", " "),
    ]
    tokenizer, store = Once(), Store(tmp_path / "pages")
    for _ in range(2):
        made, lexical = outlines(documents, tokenizer, store, "words")
        fresh, plain = outlines(documents, WordTokenizer())
        for one, other in zip(made, fresh, strict=True):
            assert (one.name, one.text) == (other.name, other.text)
            for field in ("sentences", "blocks", "tokens"):
                np.testing.assert_array_equal(getattr(one, field), getattr(other, field))
        for question in ("old rex?", "gull", "zzz", ""):
            np.testing.assert_array_equal(lexical.score(question), plain.score(question))
    assert tokenizer.used == len(documents)
    outlines([*documents[:3], Doc("c", "x")], tokenizer, store, "words")
    outlines(documents, tokenizer, store, "another")
    assert tokenizer.used == 3 * len(documents)
    assert outlines([], tokenizer, store)[0] == outlines([], tokenizer, store)[0] == []


class OneTokenHeads:
    """Attends to one token of all documents."""

    def __init__(self, token: int, tokens: int) -> None:
        self.attention = np.zeros(tokens, dtype=np.float32)
        self.attention[token] = 0.8
        self.reused = tokens

    def scores(self, question_ids: list[int]) -> np.ndarray:
        assert question_ids
        return self.attention


def test_attention_is_counted_in_tokens_across_documents() -> None:
    plain = finder_over_two_documents()
    before, after = (outline.tokens for outline in plain.outlines)
    for sentence in (0, 5, 27):  # its first token, with the space before it, is its own
        local = int(plain.outlines[1].first_tokens()[sentence])
        heads = OneTokenHeads(len(before) + local, len(before) + len(after))
        best = finder_over_two_documents(heads=heads).rank("rex", 1, "attention")[0]
        assert best.document == 1 and best.score == pytest.approx(0.8)
        assert best.focus == tuple(plain.outlines[1].sentences[sentence])
    assert "attention" in finder_over_two_documents(heads=heads).rank("rex", 1)[0].parts


def test_asking_for_what_is_not_there() -> None:
    finder = finder_over_two_documents()
    for by in ("semantic", "attention", "magic"):
        with pytest.raises(UsageError):
            finder.rank("rex", 1, by)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def encoder_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random sentence encoder in the form of all-MiniLM-L6-v2."""
    import torch
    from safetensors.torch import save_file
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
    from transformers import BertConfig, BertModel

    directory = tmp_path_factory.mktemp("encoder")
    letters = [chr(c) for c in range(97, 123)]
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", ".", *letters, *(f"##{c}" for c in letters)]
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    tokenizer.save(str(directory / "tokenizer.json"))
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(vocabulary),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        initializer_range=0.3,
    )
    (directory / "config.json").write_text(json.dumps(config.to_dict()))
    save_file(BertModel(config).state_dict(), directory / "model.safetensors")
    return directory


def test_a_sentence_has_one_vector_in_any_company(encoder_directory: Path) -> None:
    encoder = Encoder(encoder_directory)
    texts = [
        "a cat sat.",
        "b",
        "",
        "the quick brown fox " * 30,
        "a cat sat.",
        *("word " * n for n in range(40)),
    ]
    vectors = encoder.encode(texts)
    assert vectors.shape == (len(texts), 32) and vectors.dtype == np.float32
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-3)
    for text, vector in zip(texts, vectors, strict=True):
        assert encoder.encode([text])[0] @ vector > 0.999  # bf16 where the processor has it
    assert encoder.encode([]).shape == (0, 32)


def test_sentences_of_all_lengths_and_numbers_have_few_shapes(encoder_directory: Path) -> None:
    encoder = Encoder(encoder_directory)
    model, shapes = encoder._model, set()

    class Watched:
        device = model.device

        def __call__(self, ids: Tensor, mask: Tensor) -> Tensor:
            shapes.add(tuple(ids.shape))
            return model(ids, mask)

    encoder._model = Watched()
    for turn in range(200):
        encoder.encode([*("word " * (turn * n % 127) for n in range(1 + turn % 13))])
    rows, lengths = zip(*shapes, strict=True)
    assert max(r * n for r, n in shapes) <= 1024
    assert set(lengths) == {*range(16, 129, 16)} and set(rows) <= {1, 2, 4, 8, 16}


def test_the_vector_is_the_mean_of_the_stock_model(encoder_directory: Path) -> None:
    import torch
    from transformers import BertModel

    encoder = Encoder(encoder_directory)
    stock = BertModel.from_pretrained(encoder_directory, attn_implementation="eager").eval()
    ids = encoder._tokenizer.encode("a quick fox.").ids
    assert ids[0] == 2 and ids[-1] == 3
    with torch.inference_mode():
        mean = stock(torch.tensor([ids])).last_hidden_state[0].mean(0).numpy()
    assert encoder.encode(["a quick fox."])[0] @ mean / np.linalg.norm(mean) > 0.999


def test_broken_encoders_are_told(encoder_directory: Path, tmp_path: Path) -> None:
    with pytest.raises(MissingInput, match="encoder"):
        Encoder(tmp_path)
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        for whole in encoder_directory.iterdir():
            (tmp_path / whole.name).write_bytes(whole.read_bytes())
        (tmp_path / name).write_bytes((encoder_directory / name).read_bytes()[:100])
        with pytest.raises(BadInput):
            Encoder(tmp_path)


def test_a_sentence_and_those_beside_it_within_a_range() -> None:
    text = "He came. “Captain Ahab.” “What! the captain?” “Aye, he.” More."
    focus = (text.index("“What"), text.index(" “Aye"))
    assert asks(text[slice(*focus)]) and not asks("“Captain Ahab.”")
    assert text[slice(*with_neighbours(text, (0, len(text)), focus))] == text[9 : text.index(" More")]
    assert with_neighbours(text, focus, focus) == focus
