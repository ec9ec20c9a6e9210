"""Tokenizers built in code: byte-level BPE as GPT-2, SmolLM and Qwen, SentencePiece-like BPE, Unigram."""

import json
import random
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Library

from longchat_cli import tokens
from longchat_cli.errors import BadInput, MissingInput
from longchat_cli.terminal_text import Sanitizer, StopMatcher
from longchat_cli.tokens import Tokenizer

CORPUS = [
    "The whale, the whale! Call me Ishmael. Some years ago - never mind how long precisely -",
    "    def fit(self, x = 42):\n        return x == 1.5 or not x  # it's what we've said they'll do\n\n",
    "user system assistant turn start end of im the model answers\r\n\tand the user asks again   ",
    "Привет, мир. 漢字かな交じり文。 naïve café déjà vu 😀",
] * 20
QWEN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<s>", "</s>", "<start_of_turn>", "<end_of_turn>"]
CONTROL += ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
HARD = [*CONTROL, "[INST]", "[/INST]", "<think>", "</think>", "<unk>", "<pad>", "<bos>", "<eos>"]
FAST = ["gpt2", "smollm", "qwen", "llama3"]
SPM = ["gemma", "llama2", "first"]


def byte_level(kind):
    """A small byte-level BPE with the pre-tokenizer of a family."""
    library = Library(models.BPE(ignore_merges=kind == "llama3"))
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=kind in ("gpt2", "smollm"))
    before = {
        "gpt2": [],
        "smollm": [pre_tokenizers.Digits(individual_digits=True)],
        "qwen": [pre_tokenizers.Split(Regex(QWEN), "isolated")],
        "llama3": [pre_tokenizers.Split(Regex(QWEN.replace(r"|\p{N}", r"|\p{N}{1,3}")), "isolated")],
    }[kind]
    if kind == "qwen":
        library.normalizer = normalizers.NFC()
    library.pre_tokenizer = pre_tokenizers.Sequence([*before, level]) if before else level
    library.decoder = decoders.ByteLevel()
    # SmolLM2 has no tokens for some control characters.
    missing = {"\x04", "\x13"} if kind == "smollm" else set()
    written = {pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str(c)[0][0] for c in missing}
    alphabet = [c for c in pre_tokenizers.ByteLevel.alphabet() if c not in written]
    library.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=700, initial_alphabet=alphabet, show_progress=False)
    )
    library.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in CONTROL])
    if kind == "qwen":
        library.add_tokens([AddedToken(t, normalized=False) for t in ("<think>", "</think>")])
    if kind == "llama3":
        start = "<|begin_of_text|>"
        library.post_processor = processors.TemplateProcessing(
            single=f"{start} $A", special_tokens=[(start, library.token_to_id(start))]
        )
    return json.loads(library.to_str())


def sentencepiece(kind):
    """A small SentencePiece-like BPE: blanks as ▁, bytes for what has no token."""
    library = Library(models.BPE())
    replace = normalizers.Replace(" ", "▁")
    library.normalizer = (
        normalizers.Sequence([normalizers.Prepend("▁"), replace]) if kind == "llama2" else replace
    )
    library.pre_tokenizer = pre_tokenizers.Split(Regex("▁"), "merged_with_next")
    library.train_from_iterator(CORPUS[:60], trainers.BpeTrainer(vocab_size=600, show_progress=False))
    data = json.loads(library.to_str())
    names = ["<pad>", "<eos>" if kind == "gemma" else "</s>", "<bos>" if kind == "gemma" else "<s>", "<unk>"]
    names += ["<start_of_turn>", "<end_of_turn>"] if kind == "gemma" else ["<think>"]
    names += ["\n\n"] if kind == "gemma" else []
    pieces = [*names, *(f"<0x{b:02X}>" for b in range(256)), *data["model"]["vocab"]]
    data["model"]["vocab"] = {piece: i for i, piece in enumerate(dict.fromkeys(pieces))}
    data["model"] |= {"byte_fallback": True, "unk_token": "<unk>", "fuse_unk": True}
    data["pre_tokenizer"] = None
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if kind == "first":
        data["normalizer"] = None
        data["pre_tokenizer"] = {
            "type": "Metaspace",
            "replacement": "▁",
            "prepend_scheme": "first",
            "split": False,
        }
    if kind != "gemma":
        steps.append(decoders.Strip(" ", 1, 0))
    final = Library.from_str(json.dumps(data))
    final.decoder = decoders.Sequence(steps)
    data = json.loads(final.to_str())
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    data["added_tokens"] = [
        {"id": i, "content": name, "special": name[0] == "<" and name != "<think>", **flags}
        for i, name in enumerate(names)
    ]
    return data


def write(directory, data, **config):
    """A model directory of tokenizer.json and tokenizer_config.json."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "tokenizer.json").write_text(json.dumps(data), "utf-8")
    (directory / "tokenizer_config.json").write_text(json.dumps(config), "utf-8")
    return directory


@pytest.fixture(scope="session")
def directories(tmp_path_factory):
    root = tmp_path_factory.mktemp("tokenizers")
    made = {kind: write(root / kind, byte_level(kind), eos_token="<|im_end|>") for kind in FAST}
    gemma = {"bos_token": "<bos>", "eos_token": "<eos>", "add_bos_token": True}
    made["gemma"] = write(root / "gemma", sentencepiece("gemma"), **gemma)
    for kind in ("llama2", "first"):
        made[kind] = write(root / kind, sentencepiece(kind), bos_token="<s>", eos_token={"content": "</s>"})
    return made


@pytest.fixture(scope="session")
def every(directories, models_home):
    return {kind: Tokenizer.from_dir(path) for kind, path in directories.items()}


def library_of(path):
    """The library as shipped, its control tokens not recognised in text."""
    library = Library.from_file(str(path / "tokenizer.json"))
    library.encode_special_tokens = True
    return library


TEXTS = [
    "x =   42",
    "it's  what\n\n\twe've 12345 said\r\n  ",
    "naïve cafe\u0301 漢字😀 👩\u200d👩\u200d👧",
    "a\x04b!\x04!\x13",
    " leading and trailing ",
    "\u2028\x85\xa0 1٣²",
    "",
    " ",
    "\n\n\nx",
]


@pytest.mark.parametrize("kind", FAST + SPM)
def test_ids_are_the_librarys(every, directories, kind):
    library = library_of(directories[kind])
    for text in TEXTS:
        assert every[kind].encode(text) == library.encode(text, add_special_tokens=False).ids, text


@pytest.mark.parametrize("kind", FAST)
def test_byte_level_is_served_by_tiktoken(every, kind):
    assert every[kind].fast, every[kind].fast_reason


@pytest.mark.parametrize("kind", SPM)
def test_sentencepiece_is_served_by_tokenizers(every, kind):
    assert not every[kind].fast
    assert "pre-tokenizer" in every[kind].fast_reason


def test_smollm_digits_and_blanks(every):
    smollm = every["smollm"]
    pieces = [smollm.token_bytes(id) for id in smollm.encode("x =   42")]
    assert pieces[-3:] == [b"   ", b"4", b"2"]


@pytest.mark.parametrize("kind", FAST + SPM)
@settings(max_examples=60, deadline=None)
@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=60))
def test_offsets_and_round_trip(every, kind, text):
    tokenizer = every[kind]
    ids, starts = tokenizer.encode_with_offsets(text)
    assert ids == tokenizer.encode(text)
    assert len(ids) == len(starts) and starts == sorted(starts)
    assert all(0 <= s < len(text) for s in starts)
    if kind in ("gpt2", "llama3", "gemma"):
        assert tokenizer.decode(ids) == text
    if kind in ("gpt2", "llama3"):
        data = b"".join(tokenizer.token_bytes(i) for i in ids)
        assert data == text.encode()


@pytest.mark.parametrize("kind", FAST + SPM)
def test_offsets_of_fast_and_library_agree(every, kind):
    tokenizer = every[kind]
    for text in TEXTS:
        ids, starts = tokenizer.encode_with_offsets(text, prefix=False)
        assert (ids, starts) == tokenizer._library_encode(text) if text else ids == []


@pytest.mark.parametrize("kind", FAST + SPM)
def test_text_never_becomes_a_control_token(every, kind):
    tokenizer = every[kind]
    control = set(tokenizer.special.values())
    assert control
    for text in {*HARD, *tokenizer.special}:
        for embedded in (
            text,
            f"a{text}b",
            f" {text}\n{text}",
            text * 3,
            f"{text}system\n",
            text[:-1] + text,
        ):
            ids = tokenizer.encode(embedded)
            assert control.isdisjoint(ids), (embedded, ids)
            # Metaspace adds no space where there is one, and decoding drops one.
            assert tokenizer.decode(ids) == (embedded.removeprefix(" ") if kind == "first" else embedded)


@settings(max_examples=200, deadline=None)
@given(parts=st.lists(st.one_of(st.sampled_from(HARD), st.text(max_size=5)), max_size=8))
def test_text_never_becomes_a_control_token_in_any_mix(every, parts):
    for tokenizer in every.values():
        assert set(tokenizer.special.values()).isdisjoint(tokenizer.encode("".join(parts)))


def test_a_vocabulary_that_merges_to_its_control_token(tmp_path):
    """BPE merges, whole-word look-up and Unigram can all spell out a control token: the text is cut."""
    vocab = {"</s>": 0, "<": 1, "/": 2, "s": 3, ">": 4, "</": 5, "s>": 6, "a": 7, "[UNK]": 8}
    merges = [("<", "/"), ("s", ">"), ("</", "s>")]
    bpe = Library(models.BPE(vocab=vocab, merges=merges))
    whole = Library(models.BPE(vocab=vocab, merges=merges, ignore_merges=True))
    unigram = Library(models.Unigram([(t, 0.0 if t == "</s>" else -5.0) for t in vocab], unk_id=8))
    for number, library in enumerate((bpe, whole, unigram)):
        library.add_special_tokens(["</s>", "[UNK]"])
        tokenizer = Tokenizer.from_dir(write(tmp_path / str(number), json.loads(library.to_str())))
        assert 0 in Library.from_str(library.to_str()).encode("a</s>a").ids
        ids = tokenizer.encode("a</s>a</s></s>")
        assert not {0, 8} & set(ids)
        assert tokenizer.decode(ids) == "a</s>a</s></s>"
        assert tokenizer.encode("a漢a") == [7, 7]  # nothing stands for it; <unk> is a control token


def test_control_pieces(every):
    chatml = every["smollm"]
    start, end = chatml.special["<|im_start|>"], chatml.special["<|im_end|>"]
    ids = chatml.encode_control("<|im_start|>user\nhi<|im_end|>\n")
    assert ids == [start, *chatml.encode("user\nhi"), end, *chatml.encode("\n")]
    assert chatml.token_bytes(start) == b"" and chatml.decode([start, *chatml.encode("a"), end]) == "a"
    llama = every["llama2"]  # its normalizer puts a space before each stretch of text
    assert llama.encode_control("<s>a</s>a")[1:2] == llama.encode("a") == llama.encode_control("</s>a")[1:]
    assert llama.encode("a", prefix=False) != llama.encode("a")


def test_blanks_beside_a_control_token_go_where_the_vocabulary_says(tmp_path, directories):
    data = json.loads((directories["gpt2"] / "tokenizer.json").read_text())
    for token in data["added_tokens"]:
        token["rstrip"] = token["content"] == "<|im_end|>"
        token["lstrip"] = token["content"] == "<|im_start|>"
    path = write(tmp_path / "t", data)
    library = Library.from_file(str(path / "tokenizer.json"))
    text = "a \n<|im_start|> b <|im_end|>\n c"
    assert Tokenizer.from_dir(path).encode_control(text) == library.encode(text, add_special_tokens=False).ids


def test_thinking_marks_are_control_in_text_and_visible_in_answers(every):
    qwen = every["qwen"]
    think = qwen.special["<think>"]
    assert think not in qwen.encode("<think>")
    assert qwen.encode_control("<think>") == [think]
    assert qwen.decode([think]) == "<think>"


def test_ordinary_added_tokens_are_used(every):
    gemma = every["gemma"]
    assert "\n\n" not in gemma.special
    assert [gemma.token_bytes(i) for i in gemma.encode("\n\n")] == [b"\n\n"]


def test_bos_and_eos(directories, tmp_path):
    gemma = Tokenizer.from_dir(directories["gemma"])
    assert gemma.bos_id == gemma.special["<bos>"] and gemma.add_bos
    assert gemma.eos_ids == {gemma.special["<eos>"], gemma.special["<end_of_turn>"]}
    llama3 = Tokenizer.from_dir(directories["llama3"])
    assert llama3.add_bos and llama3.bos_id == llama3.special["<|begin_of_text|>"]
    copy = tmp_path / "copy"
    write(copy, json.loads((directories["gpt2"] / "tokenizer.json").read_text()))
    (copy / "config.json").write_text('{"eos_token_id": 3, "text_config": {"eos_token_id": [4]}}')
    (copy / "generation_config.json").write_text('{"eos_token_id": [5, 6]}')
    assert {3, 4, 5, 6} <= Tokenizer.from_dir(copy).eos_ids


def test_bos_comes_from_the_configuration(directories):
    gpt2 = Tokenizer.from_dir(directories["gpt2"])
    assert gpt2.bos_id is None and not gpt2.add_bos
    assert gpt2.vocab_size == 1 + max(gpt2.special.values())


@pytest.mark.parametrize("kind", ["gpt2", "gemma", "llama2"])
def test_streaming_gives_whole_characters(every, directories, kind):
    tokenizer = every[kind]
    text = "Ça: 漢字 😀 👩\u200d👧 naïve\n\n  end"
    decoder = tokenizer.decoder()
    pieces = [decoder.push(id) for id in tokenizer.encode(text)] + [decoder.flush()]
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)
    library = Library.from_file(str(directories[kind] / "tokenizer.json"))
    assert tokenizer.decode(tokenizer.encode(text)) == library.decode(tokenizer.encode(text))


def test_streaming_incomplete_character(every):
    ids = every["gpt2"].encode("😀")
    decoder = every["gpt2"].decoder()
    assert [decoder.push(id) for id in ids[:-1]] == [""] * (len(ids) - 1)
    assert decoder.flush() == "\ufffd"


@pytest.mark.parametrize("kind", ["smollm", "qwen", "gemma"])
@pytest.mark.parametrize("character", [" ", "\n", "a", "!", "漢", "\x85", "é"])
def test_huge_runs_neither_crash_nor_grow_quadratically(every, kind, character):
    begun = time.perf_counter()
    ids = every[kind].encode(character * 150_000)
    assert every[kind].decode(ids) == character * 150_000
    assert time.perf_counter() - begun < 20


@pytest.mark.parametrize("kind", FAST + SPM)
def test_cuts_do_not_change_the_tokens(every, directories, kind, monkeypatch):
    seeded = random.Random(1)
    words = " ".join(CORPUS).split(" ")
    text = " ".join(seeded.choice(words) + seeded.choice(["", " ", "\n", "\n\n", " 12"]) for _ in range(4000))
    monkeypatch.setattr(tokens, "CHUNK", 300)
    assert (
        every[kind].encode(text) == library_of(directories[kind]).encode(text, add_special_tokens=False).ids
    )


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["smollm", "gemma"])
def test_a_line_of_50_megabytes(every, kind):
    line = "whale and ship 42 " * 2_800_000
    assert every[kind].decode(every[kind].encode(line)) == line


def test_lone_surrogates_become_replacement_characters(every):
    for tokenizer in every.values():
        assert tokenizer.decode(tokenizer.encode("a\ud83db")) == "a\ufffdb"
        assert tokenizer.encode_with_offsets("a\ud83db")[1][0] == 0


def test_the_verdict_is_remembered_and_verification_can_fail(directories, tmp_path, monkeypatch):
    monkeypatch.setenv("LONGCHAT_CACHE_DIR", str(tmp_path / "cache"))
    first = Tokenizer.from_dir(directories["smollm"])
    monkeypatch.setattr(tokens, "_verify", lambda *_: pytest.fail("verified again"))
    assert Tokenizer.from_dir(directories["smollm"]).fast
    monkeypatch.undo()
    monkeypatch.setenv("LONGCHAT_CACHE_DIR", str(tmp_path / "other"))
    monkeypatch.setattr(tokens, "_GPT2_DIGITS", tokens._GPT2)  # ignores the digits rule
    wrong = Tokenizer.from_dir(directories["smollm"])
    assert not wrong.fast and "differs on" in wrong.fast_reason
    assert wrong.encode("x =   42") == first.encode("x =   42")
    monkeypatch.setattr(tokens, "_verify", lambda *_: pytest.fail("verified again"))
    assert Tokenizer.from_dir(directories["smollm"]).fast_reason == wrong.fast_reason


def test_a_damaged_verdict_and_an_unwritable_cache_are_no_obstacle(directories, tmp_path, monkeypatch):
    monkeypatch.setenv("LONGCHAT_CACHE_DIR", str(tmp_path))
    Tokenizer.from_dir(directories["gpt2"])
    for file in (tmp_path / "tokenizers").iterdir():
        file.write_text("{")
    assert Tokenizer.from_dir(directories["gpt2"]).fast
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("LONGCHAT_CACHE_DIR", str(blocked))
    assert Tokenizer.from_dir(directories["gpt2"]).fast


def test_damaged_files(tmp_path):
    with pytest.raises(MissingInput, match="tokenizer.json"):
        Tokenizer.from_dir(tmp_path)
    for content in (
        "",
        "{",
        "[]",
        "{}",
        '{"model": {}}',
        '{"model": {"type": "BPE", "vocab": 3, "merges": []}}',
    ):
        (tmp_path / "tokenizer.json").write_text(content)
        with pytest.raises(BadInput):
            Tokenizer.from_dir(tmp_path).encode("a")
    (tmp_path / "tokenizer_config.json").write_text("[]")
    with pytest.raises(BadInput, match="tokenizer_config"):
        Tokenizer.from_dir(tmp_path)


def test_the_default_model(default_model_dir: Path):
    tokenizer = Tokenizer.from_dir(default_model_dir)
    assert tokenizer.fast, tokenizer.fast_reason
    assert [tokenizer.token_bytes(i) for i in tokenizer.encode("x =   42")] == [
        b"x",
        b" =",
        b"   ",
        b"4",
        b"2",
    ]
    assert tokenizer.eos_ids >= {2} and not tokenizer.add_bos
    for text in tokenizer.special:
        assert set(tokenizer.special.values()).isdisjoint(tokenizer.encode(f"a {text}\n{text}"))


# terminal_text

ESCAPES = [
    ("plain\ttext\n", "plain\ttext\n"),
    ("a\r\nb\rc", "a\nbc"),
    ("\x1b[31mred\x1b[0m", "red"),
    ("\x1b[?25l\x1b[2J\x1b[1;1Hx", "x"),
    ("\x1b]0;title\x07x\x1b]8;;http://e\x1b\\link", "xlink"),
    ("\x1bPq#0;2\x1b\\x\x1b_apc\x1b\\y\x1b^pm\x1b\\z\x1bXsos\x1b\\", "xyz"),
    ("\x9b31mx\x9d0;t\x9cy\x90dcs\x9cz\x84", "xyz"),
    ("\x1b(Bx\x1b7y\x1bcz\x1b", "xyz"),
    ("a\x00\x07\x08\x7fb", "ab"),
    ("\u202eevil\u202c \u2066x\u2069", "evil x"),
    ("\x1b]0;never ended\nnext", "\nnext"),
    ("\x1b[31\nx\x1b\ny", "\nx\ny"),
    ("漢字 😀 \u200d é", "漢字 😀 \u200d é"),
]


@pytest.mark.parametrize(("given_text", "expected"), ESCAPES)
def test_sanitizer(given_text, expected):
    assert Sanitizer().feed(given_text) == expected
    byte_wise = Sanitizer()
    assert "".join(map(byte_wise.feed, given_text)) + byte_wise.flush() == expected


@settings(max_examples=200, deadline=None)
@given(
    pieces=st.lists(
        st.text(st.sampled_from("a;0[]m\\\x1b\x9b\x9c\x9d\x07\r\n\t\u202e?(P"), max_size=6), max_size=6
    )
)
def test_sanitizer_does_not_depend_on_the_pieces(pieces):
    whole, parts = Sanitizer(), Sanitizer()
    out = whole.feed("".join(pieces))
    assert out == "".join(map(parts.feed, pieces))
    assert not set(out) & set("\x1b\x9b\x9c\x9d\x07\r\u202e")


def test_stop_matcher_holds_back_possible_prefixes():
    matcher = StopMatcher(["\nUser:", "###"])
    assert matcher.feed("Hello\nUs") == ("Hello", False)
    assert matcher.feed("age") == ("\nUsage", False)
    assert matcher.feed(" #") == (" ", False)
    assert matcher.feed("#") == ("", False)
    assert matcher.feed("# more") == ("", True)
    assert matcher.feed("x") == ("", True) and matcher.flush() == ""


def test_stop_matcher_releases_what_it_held():
    matcher = StopMatcher(["END", ""])
    assert matcher.feed("the EN") == ("the ", False)
    assert matcher.flush() == "EN" and not matcher.stopped


@settings(max_examples=200, deadline=None)
@given(
    pieces=st.lists(st.text("ab", max_size=4), max_size=6),
    stops=st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
)
def test_stop_matcher_does_not_depend_on_the_pieces(pieces, stops):
    def run(parts):
        matcher = StopMatcher(stops)
        return "".join(matcher.feed(part)[0] for part in parts) + matcher.flush(), matcher.stopped

    text = "".join(pieces)
    assert run(pieces) == run([text]) == run(text)
    ends = [i for i in range(len(text) + 1) if any(text[:i].endswith(s) for s in stops)]
    assert run([text])[1] == bool(ends)
