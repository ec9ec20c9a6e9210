"""The other program beside longchat: whether it is here, and in which forms of the model it is measured."""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from longchat_cli import config
from longchat_cli.benchmark.process import ask
from longchat_cli.errors import MissingInput, Unavailable, UsageError

PROGRAM = (sys.executable, "-m", "longchat_cli.benchmark.llama")
FORMS = ("Q4_0", "Q8_0")
"""What a GGUF model is written as beside its own form: llama.cpp's fastest forms."""
WAITS: tuple[str | None, ...] = (None, "PASSIVE")
"""How its threads may wait for each other: spinning, as it was built, or asleep, as longchat's do."""
PROBE, PROBE_STEPS = 64, 16
"""Tokens read and decoded to find out which is faster."""
INSTALL = "pip install llama-cpp-python; CONTRIBUTING.md and docs/benchmarks.md say how"


@dataclass(frozen=True)
class Form:
    """A model file as llama.cpp reads it, with or without its flash attention."""

    file: Path
    flash: bool
    label: str

    @property
    def name(self) -> str:
        return f"{self.label}{', flash attention' if self.flash else ''}"


def forms(source: str, files: Sequence[Path], threads: int, program: Sequence[str] = PROGRAM) -> list[Form]:
    """The files named, else the model's own in `source` and as FORMS; each with flash attention off and on.

    Raises Unavailable without llama-cpp-python, UsageError for a model that is no GGUF file, MissingInput.
    """
    if program is PROGRAM and importlib.util.find_spec("llama_cpp") is None:
        raise Unavailable("llama.cpp is not here", "llama-cpp-python is not installed", INSTALL)
    if missing := [file for file in files if not file.is_file()]:
        raise MissingInput(f"there is no file {missing[0]}")
    original = Path(source)
    if not files and not (original.is_file() and original.suffix == ".gguf"):
        raise UsageError(
            "llama.cpp reads GGUF files only", f"{source} is none", "name one with --peer-models"
        )
    found = files or [original, *(written(original, form, threads, program) for form in FORMS)]
    short = [_label(file) for file in found]
    labels = short if len({*short}) == len(short) else [file.stem for file in found]
    return [
        Form(file, flash, label) for file, label in zip(found, labels, strict=True) for flash in (False, True)
    ]


def _label(file: Path) -> str:
    """`Q4_0` of `model.Q4_0.gguf`, else all of the name."""
    kind = re.search(r"[.-](I?Q\d\w*|B?F16|F32)$", file.stem, re.IGNORECASE)
    return kind[1] if kind else file.stem


def waiting(
    form: Form, ids: Sequence[int], threads: int, program: Sequence[str] = PROGRAM
) -> Mapping[str, str | None]:
    """The environment in which the other program is fastest now, by a short run in each.

    Spinning threads win on an idle machine; on a busy one they lose most of the time. Raises as `ask`.
    """
    text = {"ids": ids[:PROBE], "following": ids[PROBE : PROBE + PROBE_STEPS], "warm": 8}
    job = {"file": str(form.file), "flash": form.flash, "threads": threads, **text}
    environments = [{"OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": wait} for wait in WAITS]
    taken = [ask(program, job, environment) for environment in environments]
    seconds = [figures["first_s"] + PROBE_STEPS * figures["step_s"] for figures in taken]
    return environments[seconds.index(min(seconds))]


def written(source: Path, form: str, threads: int, program: Sequence[str] = PROGRAM) -> Path:
    """`source` in another form, in the cache directory; made once."""
    folder = config.private(config.cache_dir() / "bench")
    size = source.stat().st_size
    target = folder / f"{source.stem}-{size}.{form}.gguf"
    if not target.exists():
        partial = target.with_suffix(f".{os.getpid()}.part")
        try:
            job = {"form": form, "source": str(source), "target": str(partial), "threads": threads}
            ask(program, job, {})
            partial.replace(target)
        finally:
            partial.unlink(missing_ok=True)
    return target
