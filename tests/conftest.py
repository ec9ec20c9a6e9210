"""Fixtures for every test: own directories, the default model (pulled once per user), tiny models."""

from __future__ import annotations

import json
import os
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import platformdirs
import pytest

TEXT = (
    "The river ran past the old mill, and the miller counted 42 sacks of grain before the rain came down. "
    "She said: it is what it is! Then they walked along the river to the town, where nobody knew them.\n"
)
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
VOCABULARY = 400
_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "initializer_range": 0.1,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_HYBRID = {"sliding_window": 32, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": None},
    "qwen2": {},
    "qwen3": {},
    "gemma2": _HYBRID,
    "gemma3_text": _HYBRID,
    "phi3": {},
    "smollm3": {},
    "cohere2": _HYBRID,
    "olmo2": {},
    "granite": {},
    "glm4": {},
    "stablelm": {},
    "starcoder2": {"sliding_window": None},
    "opt": {"ffn_dim": 96, "word_embed_proj_dim": 64},
}


# Tests do not measure speed: a busy machine must not fail them.
hypothesis.settings.register_profile("untimed", deadline=None)
hypothesis.settings.load_profile("untimed")


def pytest_configure(config: pytest.Config) -> None:
    """Under nohup and in a background job of a script signals are ignored, here and in what tests start."""
    for name, handler in (("SIGINT", signal.default_int_handler), ("SIGHUP", signal.SIG_DFL)):
        number = getattr(signal, name, None)  # Windows has no SIGHUP
        if number is not None and signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--book", help="a text file for slow checks on real prose")
    parser.addoption("--fuzz", type=int, default=2000, help="mutated documents that a slow check reads")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """The matrix method x architecture in numbers, and why cells were skipped."""
    matrix = {
        kind: [r for r in terminalreporter.stats.get(kind, ()) if "test_architectures.py" in r.nodeid]
        for kind in ("passed", "failed", "skipped")
    }
    if not any(matrix.values()):
        return
    ids = (report.nodeid.partition("[")[2] for reports in matrix.values() for report in reports)
    cells = {cell for cell in ids if " x " in cell}
    counts = ", ".join(f"{len(reports)} {kind}" for kind, reports in matrix.items())
    terminalreporter.section("method x architecture")
    terminalreporter.line(f"{len(cells)} cells; their tests: {counts} (all cells: -m 'slow or not slow')")
    reasons = Counter(report.longrepr[2].removeprefix("Skipped: ") for report in matrix["skipped"])
    for reason, count in reasons.items():
        terminalreporter.line(f"{count} skipped: {reason or 'UNEXPLAINED'}")


@pytest.fixture(scope="session", autouse=True)
def models_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """longchat's directories for the session; pulled models alone outlive it, in a per-user cache.

    LONGCHAT_TEST_CACHE names another place for that cache. Returns the data directory.
    """
    default = platformdirs.user_cache_path("longchat-tests")
    kept = Path(os.environ.get("LONGCHAT_TEST_CACHE") or default) / "models"
    kept.mkdir(parents=True, exist_ok=True)
    home = tmp_path_factory.mktemp("longchat")
    (home / "data").mkdir()
    (home / "data" / "models").symlink_to(kept, target_is_directory=True)
    with pytest.MonkeyPatch.context() as patch:
        for name in ("config", "data", "cache", "state"):
            patch.setenv(f"LONGCHAT_{name.upper()}_DIR", str(home / name))
        patch.setenv("LONGCHAT_NO_LOG", "1")
        yield home / "data"


@pytest.fixture(scope="session")
def default_model_dir(models_home: Path) -> Path:
    """The ready form of the real default model, pulled with longchat's own code on the first run."""
    from longchat_cli.models import load

    return load.find("smollm2").path


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`tiny_model(arch, **config)`: the directory of a random float32 model of 3 layers, width 64."""
    made: dict[str, Path] = {}

    def make(arch: str = "llama", **options: Any) -> Path:
        key = json.dumps([arch, options], sort_keys=True)
        if key not in made:
            made[key] = write_tiny_model(tmp_path_factory.mktemp(f"tiny-{arch}"), arch, **options)
        return made[key]

    return make


def write_tiny_model(directory: Path, arch: str, **options: Any) -> Path:
    """Write config.json, model.safetensors and a tokenizer with a chat template into `directory`."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(arch, **_SIZES | ARCHITECTURES.get(arch, {}) | options)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(directory)
    write_tiny_tokenizer(directory)
    return directory


@pytest.fixture(scope="module")
def tokenizer_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the tiny tokenizer."""
    directory = tmp_path_factory.mktemp("tokenizer")
    write_tiny_tokenizer(directory)
    return directory


@pytest.fixture(scope="module")
def tokenizer(tokenizer_dir: Path) -> Any:
    """The tiny tokenizer."""
    from longchat_cli.tokens import Tokenizer

    return Tokenizer.from_dir(tokenizer_dir)


def write_tiny_tokenizer(directory: Path) -> None:
    """A byte-level BPE tokenizer with ChatML, trained on a few lines; ids stay below VOCABULARY."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT] * 3, trainer)
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "add_bos_token": False,
        "chat_template": CHATML,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Tiny tensors are slower on more threads, by far on a busy machine."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
