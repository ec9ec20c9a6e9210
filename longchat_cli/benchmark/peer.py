"""The other program beside longchat: whether it is here, and in which forms of the model it is measured."""

from __future__ import annotations

import importlib.util
import os
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
ENVIRONMENT: Mapping[str, str | None] = {"OMP_WAIT_POLICY": None}
"""longchat waits passively; the other program waits as it likes."""
INSTALL = "pip install llama-cpp-python; CONTRIBUTING.md and docs/benchmarks.md say how"


@dataclass(frozen=True)
class Form:
    """A model file as llama.cpp reads it, with or without its flash attention."""

    file: Path
    flash: bool

    @property
    def name(self) -> str:
        return f"{self.file.stem}{', flash attention' if self.flash else ''}"


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
    return [Form(file, flash) for file in found for flash in (False, True)]


def written(source: Path, form: str, threads: int, program: Sequence[str] = PROGRAM) -> Path:
    """`source` in another form, in the cache directory; made once."""
    folder = config.private(config.cache_dir() / "bench")
    size = source.stat().st_size
    target = folder / f"{source.stem}-{size}.{form}.gguf"
    if not target.exists():
        partial = target.with_suffix(f".{os.getpid()}.part")
        try:
            job = {"form": form, "source": str(source), "target": str(partial), "threads": threads}
            ask(program, job, ENVIRONMENT)
            partial.replace(target)
        finally:
            partial.unlink(missing_ok=True)
    return target
