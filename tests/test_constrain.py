"""Answers by a JSON Schema: whatever a model wants, what comes out satisfies the schema."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result

from longchat_cli.cli import cli
from longchat_cli.constrain import MAX_BYTES, Constraint, read_schema
from longchat_cli.errors import BadInput, LongchatError, MissingInput, UsageError
from longchat_cli.tokens import Tokenizer

pytest.importorskip("llguidance", reason="not installed")
jsonschema = pytest.importorskip("jsonschema", reason="the test extra is not installed")

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["new", "old", "späť"]}, "minItems": 1, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
SCHEMAS: list[Any] = [
    PERSON,
    {"type": "integer", "minimum": -5, "maximum": 999, "multipleOf": 7},
    {"type": "number", "exclusiveMinimum": 0.5, "maximum": 2},
    {"type": "string", "pattern": "^(a|bc){2,5}[0-9]+$", "maxLength": 12},
    {"type": "string", "format": "date"},
    {"enum": [1, "two", None, [3], {"four": 4}]},
    {"const": {"a": [1, 2]}},
    {"type": ["boolean", "null"]},
    {"anyOf": [{"type": "integer", "maximum": 9, "minimum": 0}, PERSON]},
    {"type": "array", "prefixItems": [{"type": "boolean"}, {"const": "x"}], "items": False, "minItems": 2},
    {"type": "object", "patternProperties": {"^k[0-9]$": {"type": "boolean"}}, "additionalProperties": False,
     "maxProperties": 3},
    {"$ref": "#/$defs/node", "$defs": {"node": {
        "type": "object", "properties": {"v": {"type": "boolean"}, "next": {"$ref": "#/$defs/node"}},
        "required": ["v"], "additionalProperties": False}}},
]  # fmt: skip


def written(tmp_path: Path, schema: Any) -> str:
    (tmp_path / "schema.json").write_text(json.dumps(schema), encoding="utf-8")
    return read_schema(str(tmp_path / "schema.json"))


def sampled(schema: str, tokenizer: Tokenizer, seed: int) -> str:
    """What a model writes that wants anything at all, and the end rather than nothing."""
    generator = torch.Generator().manual_seed(seed)
    constraint, ids = Constraint(schema, tokenizer), []
    for step in range(600):
        logits = torch.randn(tokenizer.vocab_size + 3, generator=generator)
        logits[list(tokenizer.eos_ids)] += step / 20
        logits[tokenizer.encode('"')[0]] += step / 40
        token = int(constraint.allow(logits).argmax())
        if token in tokenizer.eos_ids:
            return tokenizer.decode(ids)
        constraint.take(token)
        ids.append(token)
    raise AssertionError("no end")


@pytest.mark.parametrize("schema", SCHEMAS, ids=lambda schema: re.sub(r"\W+", "-", json.dumps(schema))[:40])
def test_whatever_is_sampled_satisfies_the_schema(tmp_path: Path, tokenizer: Tokenizer, schema: Any) -> None:
    text = written(tmp_path, schema)
    checker = jsonschema.Draft202012Validator(schema, format_checker=jsonschema.FormatChecker())
    answers = {sampled(text, tokenizer, seed) for seed in range(12)}
    for answer in answers:
        checker.validate(json.loads(answer))
    assert len(answers) > 1 or "const" in schema


def test_logits_of_what_is_allowed_stay(tmp_path: Path, tokenizer: Tokenizer) -> None:
    constraint = Constraint(written(tmp_path, {"type": "boolean"}), tokenizer)
    logits = torch.randn(tokenizer.vocab_size + 5)
    allowed = constraint.allow(logits)
    kept = allowed > -torch.inf
    assert torch.equal(allowed[kept], logits[kept])
    first = {tokenizer.token_bytes(int(id)) for id in kept.nonzero()}
    assert all(b"true".startswith(text) or b"false".startswith(text) for text in first)
    assert {b"t", b"f"} <= first


@pytest.mark.parametrize(
    ("schema", "part"),
    [
        ({"type": "strng"}, "Invalid type"),
        ({"not": {"type": "string"}}, "not"),
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"type": "string", "pattern": "("}, "regex"),
        ({"type": "string", "pattern": "^(?=a)b"}, "look"),
        ({"type": "string", "format": "colour"}, "Unknown format"),
        ({"type": "string", "minLength": 5, "maxLength": 2}, "Unsatisfiable"),
        ({"allOf": [{"type": "string"}, {"type": "integer"}]}, "Unsatisfiable"),
        ({"enum": []}, "Unsatisfiable"),
        (False, "object"),
        ([1], "object"),
        ({"$ref": "https://example.org/a.json"}, "not present"),
        ({"$ref": "file:///etc/passwd"}, "not present"),
        ({"$ref": "#/$defs/none"}, "none"),
        ({"type": "integer", "minimum": 10**30, "maximum": 10**31}, "beyond 64 bits"),
        ({"x-guidance": {"lenient": True}, "not": {}}, "not"),
        ({"enum": [f"v{i}" for i in range(90_000)]}, "too big"),
    ],
)
def test_schemas_that_cannot_be_enforced(tmp_path: Path, schema: Any, part: str) -> None:
    with pytest.raises(BadInput, match=part) as caught:
        written(tmp_path, schema)
    assert caught.value.exit_code == 65
    assert len(str(caught.value).splitlines()) == 1
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    "data",
    [b"", b"{", b"\xff\xfe{", b"NaN x", b"[" * 50_000, b'{"a":' * 50_000, b" " * (MAX_BYTES + 1), b"nul"],
    ids=lambda data: repr(data[:8]),
)
def test_files_that_are_no_schema(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "schema.json").write_bytes(data)
    with pytest.raises(BadInput):
        read_schema(str(tmp_path / "schema.json"))
    with pytest.raises(MissingInput):
        read_schema(str(tmp_path / "none.json"))


def test_a_deep_schema_is_refused_or_followed(tmp_path: Path, tokenizer: Tokenizer) -> None:
    schema: Any = {"type": "integer", "maximum": 9, "minimum": 0}
    for _ in range(100):
        schema = {"type": "array", "items": schema, "minItems": 1, "maxItems": 1}
    answer = json.loads(sampled(written(tmp_path, schema), tokenizer, 0))
    for _ in range(100):
        (answer,) = answer
    assert answer in range(10)


def test_a_schema_without_an_answer_ends(tmp_path: Path, tokenizer: Tokenizer) -> None:
    with pytest.raises(BadInput, match="leaves no answer: nothing may come next"):
        sampled(written(tmp_path, {"$ref": "#"}), tokenizer, 0)


@pytest.fixture
def ask(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny_model: Callable[..., Path]
) -> Callable[..., Result]:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "note.txt").write_text("The mill has seven sails.\n")
    (tmp_path / "person.json").write_text(json.dumps(PERSON))
    (tmp_path / "bad.json").write_text("{")

    def run(*words: str) -> Result:
        model = ("--model", str(tiny_model("llama", max_position_embeddings=2048)), "--temperature", "1")
        return CliRunner().invoke(cli, ["ask", "note.txt", "Who?", *model, "--seed", "1", *words])

    return run


@pytest.mark.parametrize("method", ["full", "recall"])
def test_ask_prints_the_json_and_nothing_else(ask: Callable[..., Result], method: str) -> None:
    done = ask("--schema", "person.json", "--method", method)
    assert done.exit_code == 0, done.output
    jsonschema.validate(json.loads(done.stdout), PERSON)
    done = ask("--schema", "person.json", "--method", method, "--json")
    jsonschema.validate(json.loads(json.loads(done.stdout)["answer"]), PERSON)


def test_half_an_answer_is_none(ask: Callable[..., Result], tmp_path: Path) -> None:
    done = ask("--schema", "person.json", "--max-tokens", "4")
    assert isinstance(done.exception, LongchatError)
    assert "cut at --max-tokens; raise it" in str(done.exception)
    assert done.stdout == ""


def test_what_does_not_go_with_a_schema(ask: Callable[..., Result]) -> None:
    assert isinstance(ask("--schema", "bad.json").exception, BadInput)
    assert isinstance(ask("--schema", "none.json").exception, MissingInput)
    assert isinstance(ask("--schema", "person.json", "--quote").exception, UsageError)
    assert isinstance(ask("--schema", "person.json", "--mode", "whole").exception, UsageError)


def test_a_bad_schema_is_told_before_a_model_is_loaded(ask: Callable[..., Result]) -> None:
    done = CliRunner().invoke(cli, ["ask", "note.txt", "Who?", "--schema", "bad.json", "--model", "/none"])
    assert isinstance(done.exception, BadInput)


def test_the_library_is_loaded_only_for_a_schema() -> None:
    import subprocess

    code = "import sys, longchat_cli.local, longchat_cli.constrain\nassert 'llguidance' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
