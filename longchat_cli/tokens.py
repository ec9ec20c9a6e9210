"""Text to token ids and back, with the model's own vocabulary; text never becomes a control token.

`tiktoken` serves byte-level BPE vocabularies once it has been verified against the `tokenizers` library on
a fixed set of strings; `tokenizers` serves everything else. Neither torch nor transformers is imported.
"""

from __future__ import annotations

import codecs
import contextlib
import hashlib
import json
import os
import random
import re
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from longchat_cli.config import cache_dir, private
from longchat_cli.errors import BadInput, LongchatError, MissingInput

if TYPE_CHECKING:
    import tokenizers

Json = dict[str, Any]

CHUNK = 1 << 16
"""Characters encoded at once. Bounds the regex engines' stacks and the library's memory on huge inputs."""

_VERDICT_FORMAT = 1
_SPACE = "▁"  # how SentencePiece vocabularies write a space
_WORD_END = re.compile(r"[^\W\d_](?= )")
_LINE_END = re.compile(r"[^\W\d_](?=\s)")
_SURROGATE = re.compile("[\ud800-\udfff]")
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_MARKUP = re.compile(r"<[|｜].*[|｜]>|</?s>|<(start|end)_of_\w+>|\[/?[A-Z_]+\]|</?think>", re.DOTALL)
_END_OF_TURN = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<|end_of_turn|>", "<|endoftext|>",
                "<|end_of_text|>", "</s>", "<eos>")  # fmt: skip
_NAMED = ("bos_token", "eos_token", "pad_token", "unk_token")
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# GPT2's pattern on what lies between digits: a digit ends a piece just as the end of the text does.
_GPT2_DIGITS = r"'s|'t|'re|'ve|'m|'ll|'d|\p{N}| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\s+(?![^\s\p{N}])|\s+"


class Tokenizer:
    """The tokenizer of a model directory.

    Control tokens are the added tokens that are marked special, those that look like markup
    (`<|...|>`, `<start_of_turn>`, `[INST]`, `<think>`) and those the chat template writes. `encode` never
    yields one: their text is encoded as any other text. Other added tokens (runs of blanks, `<table>`) are
    part of the vocabulary and are used.

    Text longer than `CHUNK` characters is encoded in chunks cut between a word and a blank, where no
    pre-tokenizer or SentencePiece vocabulary in use joins tokens; a longer run without such a place is cut
    at `CHUNK` characters, which may change the tokens next to that cut and loses nothing. Characters the
    vocabulary cannot express (no byte token, or only <unk>) are dropped, as the library does without <unk>.
    """

    def __init__(self, data: bytes, settings: Settings) -> None:
        """`data` is the content of tokenizer.json. Raises BadInput."""
        self._data = data
        key = _key(data)
        verdict = _recall(key)
        try:
            self._head, model = _parse(data, verdict)
            self._prefix = _Prefix.of(self._head)
            self._read_added_tokens(settings)
            self._choose(model, verdict, key)
        except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
            raise BadInput("tokenizer.json cannot be read", str(error) or type(error).__name__) from error

    @classmethod
    def from_dir(cls, path: str | Path) -> Tokenizer:
        """Load a directory in Hugging Face's layout. Raises MissingInput or BadInput."""
        directory = Path(path)
        file = directory / "tokenizer.json"
        try:
            data = file.read_bytes()
        except OSError as error:
            other = (directory / "tokenizer.model").exists()
            why = "only tokenizer.model is there" if other else error.strerror or str(error)
            do = "use a model that ships tokenizer.json"
            raise MissingInput(f"{file} cannot be read", why, do) from error
        return cls(data, Settings.read(directory))

    def _read_added_tokens(self, settings: Settings) -> None:
        added: list[Json] = self._head.get("added_tokens") or []
        self.chat_template = settings.chat_template
        self.named = {name: text for name, text in settings.named.items() if text}
        template = self.chat_template or ""
        marks = set(self.named.values())
        control = [t for t in added if _is_control(t, template) or t["content"] in marks]
        self.special: dict[str, int] = {t["content"]: t["id"] for t in control}
        self._control_ids = frozenset(self.special.values())
        self._hidden = frozenset(t["id"] for t in control if t["special"])
        self._ordinary = {t["content"]: t["id"] for t in added if t["id"] not in self._control_ids}
        self._added_text = {t["id"]: t["content"] for t in added}
        self._control_pattern = _alternatives(control)
        ids = {name: self.special.get(text) for name, text in self.named.items()}
        first = _first_special(self._head.get("post_processor"))
        self.bos_id = ids["bos_token"] if ids.get("bos_token") is not None else self.special.get(first or "")
        starts = first is not None and self.special.get(first) == self.bos_id
        self.add_bos = self.bos_id is not None and (starts if settings.add_bos is None else settings.add_bos)
        ends = {t["id"] for t in control if t["special"] and t["content"] in _END_OF_TURN}
        own = {ids["eos_token"]} if ids.get("eos_token") is not None else set()
        self.eos_ids: frozenset[int] = frozenset(cast(set[int], own) | ends | settings.eos_ids)

    def _choose(self, model: Json | None, verdict: Json | None, key: str) -> None:
        """Let tiktoken serve if it gives the library's ids; ask the remembered verdict first."""
        self._fast: ByteBPE | None = None
        if verdict and not verdict["fast"]:
            self.fast_reason = str(verdict["reason"])
        else:
            assert model is not None
            self.fast_reason = self._try_fast(model, verified=bool(verdict))
        self.fast = self._fast is not None
        if not verdict:
            head = {} if self.fast else self._head
            _remember(key, {"fast": self.fast, "reason": self.fast_reason, "head": head})

    def _try_fast(self, model: Json, verified: bool) -> str:
        try:
            fast = ByteBPE(self._head, model, self._control_ids, self._ordinary)
            if not verified:
                _verify(fast, self._library_encode, fast.sample())
        except Unsupported as why:
            return f"tokenizers serves: {why}"
        self._fast = fast
        return "tiktoken serves: verified against tokenizers"

    @cached_property
    def _library(self) -> tuple[tokenizers.Tokenizer, dict[int, int]]:
        """The library's tokenizer without control tokens and leading-space rule, and ids it renumbered."""
        import tokenizers

        try:
            full = tokenizers.Tokenizer.from_buffer(self._data)
            parts = {name: self._head.get(name) for name in ("normalizer", "pre_tokenizer")}
            empty = {"type": "BPE", "vocab": {}, "merges": []}
            parts = cast(Json, _without_prefix(parts))
            shell = tokenizers.Tokenizer.from_str(json.dumps({"version": "1.0", "added_tokens": []} | parts
                                                             | {"post_processor": None, "decoder": None,
                                                                "model": empty}))  # fmt: skip
        except Exception as error:  # the library raises bare Exception
            raise BadInput("tokenizer.json cannot be read", str(error)) from error
        shell.model = full.model
        ordinary = [t for t in self._head.get("added_tokens") or [] if t["content"] in self._ordinary]
        flags = ("single_word", "lstrip", "rstrip", "normalized")
        shell.add_tokens(
            [tokenizers.AddedToken(t["content"], **{f: bool(t.get(f)) for f in flags}) for t in ordinary]
        )
        given = {shell.token_to_id(text): id for text, id in self._ordinary.items()}
        return shell, {k: id for k, id in given.items() if k is not None and k != id}

    @cached_property
    def vocab_size(self) -> int:
        """One more than the greatest token id."""
        if self._fast:
            size = len(self._fast.tokens)
        else:
            size = self._library[0].get_vocab_size(with_added_tokens=False)
        return max(max(self._added_text, default=-1) + 1, size)

    @property
    def prefix_after_control(self) -> bool:
        """True when text that follows a control token gets the vocabulary's leading space."""
        return self._prefix.sections

    def encode(self, text: str, *, prefix: bool = True) -> list[int]:
        """Ids of ordinary text: never a control token. `prefix` applies the model's leading-space rule."""
        text = self._prepare(text, prefix)
        ids: list[int] = []
        for begin, end in _cuts(text):
            chunk = text[begin:end]
            served = self._fast is not None and self._fast.serves(chunk)
            ids += self._fast.encode(chunk) if self._fast and served else self._library_encode(chunk)[0]
        return ids

    def encode_with_offsets(self, text: str, *, prefix: bool = True) -> tuple[list[int], list[int]]:
        """Ids as from `encode`, and for each the offset of the character of `text` it starts in."""
        prepared = self._prepare(text, prefix)
        ids: list[int] = []
        starts: list[int] = []
        for begin, end in _cuts(prepared):
            chunk = prepared[begin:end]
            if self._fast and self._fast.serves(chunk):
                new, offsets = self._fast.encode_with_offsets(chunk)
            else:
                new, offsets = self._library_encode(chunk)
            ids += new
            starts += [offset + begin for offset in offsets]
        added = len(prepared) - len(text)
        return ids, [max(start - added, 0) for start in starts] if added else starts

    def encode_control(self, text: str, *, prefix: bool = True) -> list[int]:
        """Ids of a piece of the chat template, control tokens recognised. Never for document or user text."""
        ids: list[int] = []
        for piece in self.split_control(text):
            ids += [piece] if isinstance(piece, int) else self.encode(piece, prefix=prefix)
            prefix = self.prefix_after_control
        return ids

    def split_control(self, text: str) -> list[int | str]:
        """Control token ids and the ordinary text between them, in order."""
        pieces: list[int | str] = []
        position = 0
        for match in self._control_pattern.finditer(text) if self.special else ():
            pieces.append(text[position : match.start()])
            pieces.append(self.special[cast(str, match[match.lastindex or 0])])
            position = match.end()
        pieces.append(text[position:])
        return [piece for piece in pieces if piece != ""]

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids`; control tokens give nothing, incomplete characters U+FFFD."""
        decoder = self.decoder()
        return "".join(map(decoder.push, ids)) + decoder.flush()

    def decoder(self) -> IncrementalDecoder:
        """A streaming decoder of one answer."""
        return IncrementalDecoder(self)

    def token_bytes(self, id: int) -> bytes:
        """The UTF-8 bytes token `id` stands for: b"" for special tokens and ids outside the vocabulary.

        Control tokens that the vocabulary does not mark special (`<think>`) keep their text, so that the
        caller can tell a model's thinking from its answer.
        """
        if id in self._hidden:
            return b""
        if id in self._added_text:
            return self._added_text[id].encode()
        token = self._fast.tokens[id] if self._fast and 0 <= id < len(self._fast.tokens) else None
        if self._fast:
            return token or b""
        written = self._library[0].id_to_token(id) if id >= 0 else None
        return self._bytes_of(written) if written else b""

    def _bytes_of(self, token: str) -> bytes:
        if self._byte_level:
            return _unwritten(token)
        if match := _BYTE_TOKEN.fullmatch(token):
            return bytes([int(match[1], 16)])
        return token.replace(_SPACE, " ").encode()

    @cached_property
    def _byte_level(self) -> bool:
        return any(_find(self._head.get(part), "ByteLevel") for part in ("pre_tokenizer", "decoder"))

    @cached_property
    def strips_first_space(self) -> bool:
        """True when decoding drops one leading space: the one that encoding added."""
        decoder = self._head.get("decoder")
        strip = _find(decoder, "Strip")
        space = _find(decoder, "Metaspace")
        return bool(strip and strip["start"]) or bool(space and _scheme(space) != "never")

    def _prepare(self, text: str, prefix: bool) -> str:
        if not text.isascii():
            text = _SURROGATE.sub("\ufffd", text)  # lone surrogates are not text; keeps the length
        return self._prefix.text + text if prefix and self._prefix.applies(text) else text

    def _library_encode(self, chunk: str) -> tuple[list[int], list[int]]:
        """Ids and offsets by the library; text that its model turns into a control token is cut in two."""
        shell, renumbered = self._library
        encoding = shell.encode(chunk, add_special_tokens=False)
        ids: list[int] = encoding.ids
        spans: list[tuple[int, int]] = encoding.offsets
        if renumbered:
            ids = [renumbered.get(id, id) for id in ids]
        if self._control_ids.isdisjoint(ids):
            return ids, [begin for begin, _ in spans]
        hits = [span for id, span in zip(ids, spans, strict=True) if id in self._control_ids]
        cuts = [(a + b) // 2 for a, b in hits if b - a > 1 and chunk[a:b].strip() in self.special]
        if not cuts:  # <unk>: characters that the vocabulary cannot express
            kept = [(id, a) for id, (a, _) in zip(ids, spans, strict=True) if id not in self._control_ids]
            return [id for id, _ in kept], [a for _, a in kept]
        out: tuple[list[int], list[int]] = ([], [])
        for a, b in zip([0, *cuts], [*cuts, len(chunk)], strict=True):
            new, offsets = self._library_encode(chunk[a:b])
            out[0].extend(new)
            out[1].extend(offset + a for offset in offsets)
        return out


class IncrementalDecoder:
    """Bytes of tokens to text, piece by piece; an incomplete character waits for its other bytes."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._strip = tokenizer.strips_first_space

    def push(self, id: int) -> str:
        """The text that token `id` completes."""
        data = self._tokenizer.token_bytes(id)
        if self._strip and data:
            self._strip = False
            data = data.removeprefix(b" ")
        return self._utf8.decode(data)

    def flush(self) -> str:
        """What is left at the end: U+FFFD for an incomplete character."""
        return self._utf8.decode(b"", final=True)


@dataclass(frozen=True)
class Settings:
    """What lies beside tokenizer.json: template, names of special tokens, end-of-sequence ids."""

    chat_template: str | None = None
    named: dict[str, str] = field(default_factory=dict)
    add_bos: bool | None = None
    eos_ids: frozenset[int] = frozenset()

    @classmethod
    def read(cls, directory: Path) -> Settings:
        """Read the JSON files of `directory` that are there. Raises BadInput."""
        config = _read_json(directory / "tokenizer_config.json")
        names = _read_json(directory / "special_tokens_map.json") | config
        eos: set[int] = set()
        for file in ("config.json", "generation_config.json"):
            whole = _read_json(directory / file)
            for part in (whole, whole.get("text_config")):
                eos |= _ids(part.get("eos_token_id")) if isinstance(part, dict) else set()
        template: Any = config.get("chat_template")
        if (directory / "chat_template.jinja").is_file():
            template = (directory / "chat_template.jinja").read_text("utf-8", "replace")
        if isinstance(template, list):
            named_templates = {t.get("name"): t.get("template") for t in template if isinstance(t, dict)}
            template = named_templates.get("default")
        named = {name: _content(names.get(name)) for name in _NAMED}
        return cls(template if isinstance(template, str) else None, named,
                   config.get("add_bos_token"), frozenset(eos))  # fmt: skip


class Unsupported(Exception):
    """Why tiktoken cannot serve a vocabulary."""


class ByteBPE:
    """tiktoken over a model's byte-level BPE vocabulary (ranks in the order of its merges).

    tiktoken merges the pair whose joined bytes rank lowest, the library the pair whose own merge does; the
    two agree for vocabularies that were trained as such, which `_verify` checks.
    """

    def __init__(self, head: Json, model: Json, control: frozenset[int], ordinary: dict[str, int]) -> None:
        """Raises Unsupported."""
        import tiktoken

        pattern = _pattern(head.get("pre_tokenizer"))
        self._normalized = _is_nfc(head.get("normalizer"))
        _check_model(model)
        vocab: dict[str, int] = model["vocab"]
        self.tokens = _token_table(vocab)
        ranks, ids = _ranks(vocab, self.tokens, model["merges"])
        if not control.isdisjoint(ids.values()):
            raise Unsupported("a merge yields a control token")
        reached = set(ids.values()) | control | set(ordinary.values())
        if model.get("ignore_merges") and not reached.issuperset(vocab.values()):
            raise Unsupported("the vocabulary has tokens no merge yields")
        self._ids = np.zeros(256 + len(model["merges"]), np.int64)
        self._ids[list(ids)] = list(ids.values())
        self._lengths = np.array([len(token or b"") for token in self.tokens], np.int64)
        self._ordinary = re.compile("|".join(map(re.escape, ordinary))) if ordinary else None
        missing = bytes(b for b in range(256) if bytes([b]) not in ranks)
        self._missing = re.compile(b"[" + re.escape(missing) + b"]") if missing else None
        try:
            self._encoding = tiktoken.Encoding(
                "longchat", pat_str=pattern, mergeable_ranks=ranks, special_tokens={}
            )
        except ValueError as error:
            raise Unsupported(f"its pattern does not compile: {error}") from error

    def serves(self, chunk: str) -> bool:
        """False where only the library knows: bytes without a token, added tokens, text that is not NFC."""
        if self._missing and self._missing.search(chunk.encode()):
            return False
        if self._ordinary and self._ordinary.search(chunk):
            return False
        return not self._normalized or unicodedata.is_normalized("NFC", chunk)

    def encode(self, chunk: str) -> list[int]:
        """Ids of a chunk that `serves` accepted."""
        return cast(list[int], self._encode(chunk).tolist())

    def encode_with_offsets(self, chunk: str) -> tuple[list[int], list[int]]:
        """Ids, and the character each starts in: from byte lengths, as the tokens' bytes are the text's."""
        ids = self._encode(chunk)
        lengths = self._lengths[ids]
        first_byte = (np.frombuffer(chunk.encode(), np.uint8) & 0xC0) != 0x80
        character = np.cumsum(first_byte) - 1
        return ids.tolist(), character[np.cumsum(lengths) - lengths].tolist()

    def sample(self) -> list[bytes]:
        """Tokens spread over the vocabulary, for the verification."""
        known = [token for token in self.tokens if token]
        return known[:: max(len(known) // 4000, 1)]

    def _encode(self, chunk: str) -> np.ndarray[Any, np.dtype[np.int64]]:
        return cast("np.ndarray[Any, np.dtype[np.int64]]",
                    self._ids[self._encoding.encode_to_numpy(chunk, disallowed_special=())])  # fmt: skip


@dataclass(frozen=True)
class _Prefix:
    """The leading-space rule: `text` goes before a text; `sections`: also after control tokens."""

    text: str = ""
    sections: bool = False
    always: bool = False

    @classmethod
    def of(cls, head: Json) -> _Prefix:
        if (prepend := _find(head.get("normalizer"), "Prepend")) and prepend["prepend"] == _SPACE:
            return cls(" ", sections=True, always=True)
        splitter = head.get("pre_tokenizer")
        if (space := _find(splitter, "Metaspace")) and _scheme(space) != "never":
            return cls(" ", sections=_scheme(space) == "always")
        if (level := _find(splitter, "ByteLevel")) and level.get("add_prefix_space"):
            return cls(" ", sections=True)
        return cls()

    def applies(self, text: str) -> bool:
        return bool(self.text and text) and (self.always or not text.startswith((" ", _SPACE)))


def _without_prefix(part: Any) -> Any:
    """The components with the leading-space rule switched off (`_Prefix` applies it once per text)."""
    if isinstance(part, list):
        return [_without_prefix(p) for p in part if not (_find(p, "Prepend") and p["type"] == "Prepend")]
    if not isinstance(part, dict):
        return part
    kind = part.get("type")
    if kind == "Prepend":
        return None
    if kind == "Metaspace":
        return {k: v for k, v in part.items() if k != "add_prefix_space"} | {"prepend_scheme": "never"}
    if kind == "ByteLevel":
        return part | {"add_prefix_space": False}
    return {key: _without_prefix(value) for key, value in part.items()}


def _scheme(metaspace: Json) -> str:
    old = "always" if metaspace.get("add_prefix_space", True) else "never"
    return str(metaspace.get("prepend_scheme") or old)


def _components(part: Any) -> list[Json]:
    """A normalizer, pre-tokenizer, decoder or post-processor as the flat list of its steps."""
    if not part:
        return []
    if part["type"] != "Sequence":
        return [part]
    inner = next(v for k, v in part.items() if k != "type" and isinstance(v, list))
    return [step for member in inner for step in _components(member)]


def _find(part: Any, kind: str) -> Json | None:
    return next((step for step in _components(part) if step["type"] == kind), None)


def _first_special(post_processor: Any) -> str | None:
    template = _find(post_processor, "TemplateProcessing")
    single = template["single"] if template else []
    return single[0]["SpecialToken"]["id"] if single and "SpecialToken" in single[0] else None


def _is_control(token: Json, template: str) -> bool:
    text: str = token["content"]
    written = bool(text.strip()) and text in template and not text.isalnum()
    return bool(token["special"]) or written or bool(_MARKUP.fullmatch(text))


def _alternatives(control: list[Json]) -> re.Pattern[str]:
    """One pattern for all control tokens, longest first, one group each; blanks beside them as flagged."""
    return re.compile(
        "|".join(
            (r"\s*" if t.get("lstrip") else "")
            + f"({re.escape(t['content'])})"
            + (r"\s*" if t.get("rstrip") else "")
            for t in sorted(control, key=lambda t: -len(t["content"]))
        )
    )


def _cuts(text: str) -> Iterator[tuple[int, int]]:
    """Chunks of at most CHUNK characters, cut after a word and before a blank where there is one."""
    begin = 0
    while len(text) - begin > CHUNK:
        limit = begin + CHUNK
        # Word ends are near in prose; all of the chunk is searched only in odd data.
        for pattern, window in ((_WORD_END, 256), (_WORD_END, CHUNK), (_LINE_END, CHUNK)):
            ends = [m.end() for m in pattern.finditer(text, max(limit - window, begin), limit)]
            if ends:
                break
        end = ends[-1] if ends else limit
        yield begin, end
        begin = end
    if begin < len(text):
        yield begin, len(text)


def _byte_characters() -> dict[str, int]:
    """The printable stand-ins of byte-level BPE (GPT-2): character -> byte."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


_BYTE_OF = _byte_characters()
# Everything that is no stand-in maps outside latin-1, so that encoding it fails.
_TO_BYTES = dict.fromkeys(range(256), 0xFFFF) | {ord(c): b for c, b in _BYTE_OF.items()}


def _unwritten(token: str) -> bytes:
    """The bytes a byte-level token is written for. Raises UnicodeEncodeError when it is not one."""
    return token.translate(_TO_BYTES).encode("latin-1")


def _token_table(vocab: dict[str, int]) -> list[bytes | None]:
    table: list[bytes | None] = [None] * (max(vocab.values()) + 1)
    for token, id in vocab.items():
        with contextlib.suppress(UnicodeEncodeError):  # added tokens are written as they are
            table[id] = _unwritten(token)
    return table


def _ranks(
    vocab: dict[str, int], tokens: list[bytes | None], merges: list[Any]
) -> tuple[dict[bytes, int], dict[int, int]]:
    """Bytes -> rank for tiktoken, and rank -> token id. Single bytes first, then the merges in order."""
    ranks = {bytes([b]): b for c, b in _BYTE_OF.items() if c in vocab}
    ids = {b: vocab[c] for c, b in _BYTE_OF.items() if c in vocab}
    for rank, merge in enumerate(merges, 256):
        left, right = merge.split(" ") if isinstance(merge, str) else merge
        id = vocab[left + right]
        data = tokens[id]
        if data is None:
            raise Unsupported("a merge is not written in bytes")
        if data not in ranks:
            ranks[data] = rank
            ids[rank] = id
    if not ranks:
        raise Unsupported("it has no byte tokens")
    return ranks, ids


def _check_model(model: Json) -> None:
    if model.get("type", "BPE") != "BPE" or "merges" not in model:
        raise Unsupported(f"its model is {model.get('type')}, not BPE")
    options = ("dropout", "byte_fallback", "continuing_subword_prefix", "end_of_word_suffix")
    if odd := [option for option in options if model.get(option)]:
        raise Unsupported(f"its BPE uses {', '.join(odd)}")


def _is_nfc(normalizer: Any) -> bool:
    kinds = [step["type"] for step in _components(normalizer)]
    if kinds not in ([], ["NFC"]):
        raise Unsupported(f"its normalizer is {' + '.join(kinds)}")
    return kinds == ["NFC"]


def _pattern(pre_tokenizer: Any) -> str:
    """The pre-tokenizer as one regex whose successive matches are its pieces. Raises Unsupported."""
    steps = _components(pre_tokenizer)
    kinds = [step["type"] for step in steps]
    if kinds and kinds[-1] == "ByteLevel":
        whole = steps[-1].get("use_regex", True)
        if kinds == ["ByteLevel"] and whole:
            return _GPT2
        if kinds == ["Digits", "ByteLevel"] and whole:
            runs = _GPT2_DIGITS.replace(r"|\p{N}|", r"|\p{N}+|")
            return _GPT2_DIGITS if steps[0]["individual_digits"] else runs
        if kinds == ["Split", "ByteLevel"] and not whole:
            split = steps[0]
            if split["behavior"] == "Isolated" and not split["invert"] and "Regex" in split["pattern"]:
                return str(split["pattern"]["Regex"])
    raise Unsupported(f"its pre-tokenizer is {' + '.join(kinds) or 'none'}")


def _verify(fast: ByteBPE, library: Any, tokens: list[bytes]) -> None:
    """Compare both paths on a fixed set of strings; raises Unsupported on the first difference."""
    for text in _strings(tokens):
        if not fast.serves(text):
            continue
        try:
            same = fast.encode(text) == library(text)[0]
        except BaseException as error:  # a Rust panic is not an Exception
            if isinstance(error, (KeyboardInterrupt, SystemExit, LongchatError)):
                raise
            raise Unsupported(f"tiktoken fails on {text[:20]!r}") from error
        if not same:
            raise Unsupported(f"tiktoken differs on {text[:40]!r}")


def _strings(tokens: list[bytes]) -> Iterator[str]:
    """Words, blanks, digits, code, control characters, all scripts, long runs, and joined `tokens`."""
    seeded = random.Random(20)
    words = [token.decode("utf-8", "ignore") for token in tokens]
    yield from words
    for alphabet in _ALPHABETS:
        for _ in range(200):
            yield "".join(seeded.choice(alphabet) for _ in range(seeded.randrange(1, 40)))
    for _ in range(1000):
        yield "".join(seeded.choice(words) for _ in range(seeded.randrange(2, 12)))
    everything = "".join(_ALPHABETS)
    for _ in range(1000):
        yield "".join(seeded.choice(everything) for _ in range(seeded.randrange(1, 40)))
    for block in range(0, 0x20000, 0x80):  # every script; large uniform blocks thinned
        step = 16 if 0x3400 <= block < 0xD800 or 0xE000 <= block < 0xF900 or block >= 0x17000 else 1
        yield "".join(f"{chr(c)}" for c in range(block, block + 0x80, step) if not 0xD800 <= c < 0xE000)
    yield from (character * CHUNK for character in " \na!")


_ALPHABETS = (
    "abc XYZ  \n",
    " \t\n\r\x0b\x0c\x1c\x85\xa0\u2003\u2028\u3000a1.",
    "0123456789 .,:-x²½Ⅷ٣",
    "(){}[]<>=+-*/%&|^~!?;:,.\"'`#@$\\_ \nifdefx01",
    "".join(map(chr, range(0x20))) + "\x7fab 1",
    "'s't're've'm'll'd'S'T'RE a",
    "éèüßñÅØœ a\u0301\u0308\u200b\u200d\ufeff\ufffd",
    "漢字かなカナ한국어 。、「」\n",
    "Привет мир שלום مرحبا नमस्ते ไทย 1",
    "😀👩\u200d👩\u200d👧🇩🇪🏴✨️ a\U000e0061\U0010ffff",
)


def _parse(data: bytes, verdict: Json | None) -> tuple[Json, Json | None]:
    """tokenizer.json without its model, and the model unless the remembered verdict says it is not needed."""
    if verdict and not verdict["fast"]:
        return verdict["head"], None
    head = json.loads(data)
    return head, head.pop("model")


def _key(data: bytes) -> str:
    digest = hashlib.sha256(data)
    digest.update(f"{_VERDICT_FORMAT} {version('tiktoken')} {version('tokenizers')}".encode())
    return digest.hexdigest()


def _recall(key: str) -> Json | None:
    try:
        verdict = json.loads((cache_dir() / "tokenizers" / f"{key}.json").read_bytes())
        return verdict if isinstance(verdict["fast"], bool) and isinstance(verdict["head"], dict) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _remember(key: str, verdict: Json) -> None:
    """Keep the verdict; a cache that cannot be written only costs the next start a verification."""
    with contextlib.suppress(OSError, LongchatError):
        directory = private(cache_dir() / "tokenizers")
        partial = directory / f"{key}.{os.getpid()}.partial"
        partial.write_text(json.dumps(verdict), "utf-8")
        partial.replace(directory / f"{key}.json")


def _read_json(file: Path) -> Json:
    try:
        value = json.loads(file.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise BadInput(f"{file} cannot be read", str(error)) from error
    if not isinstance(value, dict):
        raise BadInput(f"{file} cannot be read", "not a JSON object")
    return value


def _ids(value: Any) -> set[int]:
    values: Iterable[Any] = value if isinstance(value, list) else [value]
    return {v for v in values if isinstance(v, int)}


def _content(token: Any) -> str:
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else ""
