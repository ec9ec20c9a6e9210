"""`longchat inspect`, and --include, --exclude, --boilerplate and --strict on the command line."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import samples
import torch
from transformers import AutoModelForCausalLM

from longchat_cli.__main__ import main
from longchat_cli.models.memory import kv_bytes
from longchat_cli.tokens import Tokenizer


@pytest.fixture
def model(tiny_model, tmp_path, monkeypatch):
    """A tiny model whose weights are damaged: nothing here may load them."""
    source, copy = tiny_model("llama"), tmp_path / "model"
    copy.mkdir()
    for file in source.iterdir():
        (copy / file.name).write_bytes(b"damaged" if file.suffix == ".safetensors" else file.read_bytes())
    folder = tmp_path / "work"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return copy


@pytest.fixture
def run(model, capsys):
    def call(*arguments):
        code = main([*arguments, "--model", str(model)])
        return code, *capsys.readouterr()

    return call


def make(files):
    for name, content in files.items():
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_bytes(content.encode() if isinstance(content, str) else content)


def test_json_counts_with_the_models_tokenizer(run, model):
    make({"p/a.txt": "the river ran\n", "p/b/c.html": samples.HTML, "p/x.bin": bytes(99), "p/no.log": "no"})
    make({"p/.gitignore": "*.log\n.gitignore\n"})
    code, out, err = run("inspect", "p", "--json")
    report = json.loads(out)
    tokenizer = Tokenizer.from_dir(model)
    expected = {
        "p/a.txt": "File: p/a.txt\n\nthe river ran\n",
        "p/b/c.html": f"File: p/b/c.html\n\n{samples.HTML_TEXT}",
    }
    assert (code, err) == (0, "")
    assert {file["name"]: file["tokens"] for file in report["files"]} == {
        name: len(tokenizer.encode(text)) for name, text in expected.items()
    }
    assert [file["characters"] for file in report["files"]] == [len(text) for text in expected.values()]
    assert report["tokens"] == sum(file["tokens"] for file in report["files"])
    assert report["files"][1]["notes"] == ["boilerplate dropped: navigation (20 characters)"]
    assert report["skips"] == [{"name": "p/x.bin", "reason": "binary data"}]
    assert (report["ignored"], report["window"], report["fits"]) == (2, 512, report["tokens"] <= 512)
    # 3 layers x 2 KV heads x 16 x key and value x 2 bytes
    assert report["memory"]["full"] == {"tokens": report["tokens"], "bytes": report["tokens"] * 384}


def test_memory_of_a_long_text_by_method(run):
    make({"a.txt": "the river ran past the old mill\n" * 1000})
    code, out, _ = run("inspect", "a.txt", "--json")
    memory, tokens = json.loads(out)["memory"], json.loads(out)["tokens"]
    assert code == 0 and tokens > 5000
    held = {name: row["tokens"] for name, row in memory.items()}
    assert held["full"] == held["quest"] == held["recycled"] == tokens
    assert (held["window"], held["sink"], held["recall"], held["snapkv"]) == (1024, 1024, 512, 1024)
    assert all(row["bytes"] == row["tokens"] * 384 for row in memory.values())


@pytest.mark.parametrize("arch", ["llama", "qwen3", "granite", "gemma2"])
def test_the_estimate_is_what_transformers_holds(tiny_model, arch):
    model = AutoModelForCausalLM.from_pretrained(tiny_model(arch), dtype=torch.bfloat16)
    with torch.no_grad():
        cache = model(torch.arange(3, 103)[None], use_cache=True).past_key_values
    held = sum(part.nbytes for layer in cache.layers for part in (layer.keys, layer.values))
    config = json.loads((tiny_model(arch) / "config.json").read_text())
    a_token = 2 * 2 * 16 * 2  # of one layer; transformers leaves room for the next one in sliding windows
    sliding = config.get("layer_types", []).count("sliding_attention")
    assert kv_bytes(config, 100) == held + sliding * a_token


def test_the_tree_has_sums_skips_and_a_verdict(run):
    make(
        {"p/README.md": "the river\n", "p/s/a.py": "x = 1\n", "p/s/deep/b.py": "y = 2\n", "p/yarn.lock": "x"}
    )
    make({"p/s/deep/page.html": samples.HTML})
    code, out, _ = run("inspect", "p")
    rows = out.split("\n\n")[0].splitlines()
    names = [row[26:] for row in rows[:7]]
    assert names == ["p/", "  README.md", "  s/", "    a.py", "    deep/", "      b.py", "      page.html"]
    sizes = [int(row[:12].replace(",", "")) for row in rows[:7]]
    assert sizes[0] == sizes[1] + sizes[2] and sizes[2] == sizes[3] + sizes[4]
    assert sizes[4] == sizes[5] + sizes[6]
    assert rows[7:] == [
        "p/s/deep/page.html: boilerplate dropped: navigation (20 characters)",
        "skipped p/yarn.lock: lock file",
    ]
    assert code == 0 and "window 512" in out and "for question and answer" in out


def test_a_token_budget_and_strict_decide_the_exit_code(run):
    make({"p/a.txt": "the river ran past the mill\n", "p/b.bin": bytes(50)})
    assert run("inspect", "p", "--token-budget", "1k")[0] == 0
    code, out, err = run("inspect", "p", "--token-budget", "5")
    assert code == 6 and "a.txt" in out and "--token-budget is 5" in err
    code, out, err = run("inspect", "p", "--strict")
    assert code == 4 and "a.txt" in out
    assert err.strip() == (
        "longchat: error: 1 input was skipped: p/b.bin: binary data; leave --strict out to go on without"
    )
    assert run("inspect", "p", "--strict", "--exclude", "*.bin")[0] == 0
    assert run("ask", "p", "where?", "--strict")[0] == 4  # before the (damaged) model is opened
    assert run("inspect", "nowhere")[0] == 66


def test_include_and_boilerplate_reach_the_reader(run):
    make({"p/a.html": samples.HTML, "p/b.txt": "text\n"})
    _, out, _ = run("inspect", "p", "--include", "*.html", "--boilerplate", "keep", "--json")
    (file,) = json.loads(out)["files"]
    assert file["name"] == "p/a.html" and file["notes"][0].startswith("boilerplate kept: navigation")


def test_many_notes_are_cut_short_for_a_question(run):
    make({f"p/{number}.html": samples.HTML for number in range(9)})
    _, _, err = run("ask", "p", "where?", "--quiet")
    assert "boilerplate" not in err
    _, _, err = run("ask", "p", "where?")
    assert err.count("boilerplate dropped") == 5 and "and 4 more such notes" in err


def test_reading_loads_no_library_that_it_does_not_need(tmp_path):
    (tmp_path / "a.txt").write_text("text\n")
    code = (
        "import sys\nfrom longchat_cli import documents\n"
        f"documents.read([{str(tmp_path / 'a.txt')!r}])\n"
        "print([name for name in ('lxml', 'pypdf', 'torch', 'transformers') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
