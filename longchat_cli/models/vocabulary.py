"""tokenizer.json and tokenizer_config.json out of a GGUF file's vocabulary, its pre-tokenizer honoured."""

from __future__ import annotations

import math
from typing import Any

from longchat_cli.errors import BadInput
from longchat_cli.models.gguf import Gguf

Json = dict[str, Any]

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 1, 2, 3, 4, 6
_SPACE = "▁"  # how SentencePiece vocabularies write a space

_BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
_BYTES_ONLY = _BYTE_LEVEL | {"use_regex": False}
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]*[{_LOWER}]+|[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]+[{_LOWER}]*|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _split(pattern: str) -> list[Json]:
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return [split, _BYTES_ONLY]


_DIGITS = [{"type": "Digits", "individual_digits": True}, _BYTE_LEVEL]
_PLAIN = [_BYTE_LEVEL]
PRE_TOKENIZERS: dict[str, list[Json]] = {
    "default": _PLAIN,
    "gpt-2": _PLAIN,
    "smollm": _DIGITS,
    "starcoder": _DIGITS,
    "refact": _DIGITS,
    "command-r": _DIGITS,
    "codeshell": _DIGITS,
    "llama-bpe": _split(_LLAMA3),
    "llama3": _split(_LLAMA3),
    "llama-v3": _split(_LLAMA3),
    "smaug-bpe": _split(_LLAMA3),
    "qwen2": _split(_QWEN2),
    "deepseek-r1-qwen": _split(_QWEN2),
    "tekken": _split(_TEKKEN),
}
"""`tokenizer.ggml.pre` -> the pre-tokenizers of tokenizer.json, as the models' own files have them."""
_WHOLE_WORDS = {
    "llama-bpe",
    "llama3",
    "llama-v3",
    "smaug-bpe",
    "tekken",
}  # a word in the vocabulary needs no merges
_STARTS_WITH_BOS = {"llama-bpe", "llama3", "llama-v3", "smaug-bpe", "tekken"}


def tokenizer_json(gguf: Gguf) -> Json:
    """The content of tokenizer.json. Raises BadInput for a vocabulary or pre-tokenizer that is not served."""
    kind = gguf.metadata.get("tokenizer.ggml.model")
    tokens, types = _tokens(gguf)
    if kind == "gpt2":
        body = _byte_level(gguf, tokens)
    elif kind == "llama":
        body = _sentencepiece(gguf, tokens, types)
    else:
        raise BadInput(
            f"{gguf.path} has a '{kind}' vocabulary", "byte-level BPE and SentencePiece are served"
        )
    added = [
        {
            "id": index,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": types[index] != _USER_DEFINED,
        }
        for index, token in enumerate(tokens)
        if types[index] in (_UNKNOWN, _CONTROL)
        # runs of blanks are merged: an added token is matched in the text as it was, before they became ▁
        or (types[index] == _USER_DEFINED and _SPACE not in token)
    ]
    head = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added}
    return head | {"post_processor": _post_processor(gguf, tokens)} | body


def tokenizer_config(gguf: Gguf) -> Json:
    """The content of tokenizer_config.json: named tokens, BOS rule and chat template."""
    tokens, _ = _tokens(gguf)
    config: Json = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "add_bos_token": adds_bos(gguf),
        "add_eos_token": False,
    }
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        index = token_id(gguf, key)
        if index is not None:
            config[f"{name}_token"] = tokens[index]
    template = gguf.metadata.get("tokenizer.chat_template")
    return config | ({"chat_template": template} if isinstance(template, str) else {})


def token_id(gguf: Gguf, name: str) -> int | None:
    """The id that `tokenizer.ggml.<name>_token_id` gives, None when there is none in the vocabulary."""
    index = gguf.metadata.get(f"tokenizer.ggml.{name}_token_id")
    inside = isinstance(index, int) and 0 <= index < len(_tokens(gguf)[0])
    return index if inside else None


def adds_bos(gguf: Gguf) -> bool:
    """Whether a prompt begins with BOS: as the file says, else as its kind of vocabulary always does."""
    stated = gguf.metadata.get("tokenizer.ggml.add_bos_token")
    if token_id(gguf, "bos") is None:
        return False
    usual = (
        gguf.metadata.get("tokenizer.ggml.model") == "llama"
        or gguf.metadata.get("tokenizer.ggml.pre") in _STARTS_WITH_BOS
    )
    return bool(stated) if stated is not None else usual


def _tokens(gguf: Gguf) -> tuple[list[str], list[int]]:
    tokens = gguf.metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not tokens or not isinstance(tokens[0], str):
        raise gguf.damaged("it holds no vocabulary")
    types = gguf.metadata.get("tokenizer.ggml.token_type") or [_NORMAL] * len(tokens)
    if not isinstance(types, list) or len(types) != len(tokens):
        raise gguf.damaged("its token types do not match its tokens")
    return tokens, types


def _byte_level(gguf: Gguf, tokens: list[str]) -> Json:
    pre = gguf.metadata.get("tokenizer.ggml.pre", "default")
    if pre not in PRE_TOKENIZERS:
        why = "splitting its text by another model's rules would give it wrong tokens"
        raise BadInput(f"{gguf.path} needs the pre-tokenizer '{pre}', which is not served", why)
    merges = gguf.metadata.get("tokenizer.ggml.merges")
    if not isinstance(merges, list) or not all(isinstance(merge, str) for merge in merges):
        raise gguf.damaged("its vocabulary has no merges")
    pairs = [merge.split(" ", 1) for merge in merges]
    return {
        "normalizer": {"type": "NFC"} if PRE_TOKENIZERS[pre] == _split(_QWEN2) else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": PRE_TOKENIZERS[pre]},
        "decoder": _BYTE_LEVEL,
        "model": _bpe(tokens, pairs) | {"ignore_merges": pre in _WHOLE_WORDS},
    }


def _sentencepiece(gguf: Gguf, tokens: list[str], types: list[int]) -> Json:
    scores = gguf.metadata.get("tokenizer.ggml.scores")
    if not isinstance(scores, list) or len(scores) != len(tokens):
        raise gguf.damaged("its vocabulary has no scores")
    prefix = bool(gguf.metadata.get("tokenizer.ggml.add_space_prefix", True))
    blanks = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    spaces = {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "}
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefix else []
    prepend = [{"type": "Prepend", "prepend": _SPACE}] if prefix else []
    unknown = token_id(gguf, "unknown")
    return {
        "normalizer": {"type": "Sequence", "normalizers": [*prepend, blanks]},
        "pre_tokenizer": None,
        "decoder": {
            "type": "Sequence",
            "decoders": [spaces, {"type": "ByteFallback"}, {"type": "Fuse"}, *strip],
        },
        "model": _bpe(tokens, _merges(tokens, types, scores))
        | {
            "byte_fallback": _BYTE in types,
            "fuse_unk": True,
            "unk_token": None if unknown is None else tokens[unknown],
        },
    }


def _merges(tokens: list[str], types: list[int], scores: list[float]) -> list[list[str]]:
    """SentencePiece merges two pieces whose union is a piece: user-defined ones first, then by best score."""
    rank = {
        token: -math.inf if kind == _USER_DEFINED else -score
        for token, kind, score in zip(tokens, types, scores, strict=True)
        if kind in (_NORMAL, _USER_DEFINED)
    }
    ranked: list[tuple[float, list[str]]] = []
    for token, first in rank.items():
        cuts = ((token[:cut], token[cut:]) for cut in range(1, len(token)))
        ranked += [(first, [a, b]) for a, b in cuts if a in rank and b in rank]
    ranked.sort(key=lambda entry: entry[0])
    return [pair for _, pair in ranked]


def _bpe(tokens: list[str], merges: list[list[str]]) -> Json:
    vocab: dict[str, int] = {}
    for index, token in enumerate(tokens):
        vocab.setdefault(token, index)
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "vocab": vocab,
        "merges": merges,
    }


def _post_processor(gguf: Gguf, tokens: list[str]) -> Json | None:
    index = token_id(gguf, "bos")
    if index is None or not adds_bos(gguf):
        return None
    bos = tokens[index]
    first = {"SpecialToken": {"id": bos, "type_id": 0}}
    a, b = ({"Sequence": {"id": name, "type_id": kind}} for name, kind in (("A", 0), ("B", 1)))
    return {
        "type": "TemplateProcessing",
        "single": [first, a],
        "pair": [first, a, b],
        "special_tokens": {bos: {"id": bos, "ids": [index], "tokens": [bos]}},
    }
