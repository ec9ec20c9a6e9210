"""From the name of a model to a decoder that can run: find it, pull or convert it if need be, load it."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from longchat_cli.errors import BadInput, MissingInput, OutOfMemory, Unavailable, UsageError
from longchat_cli.models import catalog, fetch
from longchat_cli.models.catalog import Model
from longchat_cli.models.fetch import Say, to_stderr
from longchat_cli.models.files import read_json, remembered_sha256

if TYPE_CHECKING:
    from longchat_cli.attention.hf import HFDecoder
    from longchat_cli.models.lean import LeanDecoder

    Decoder = LeanDecoder | HFDecoder

QUANTIZATIONS = ("none", "int8", "nf4")
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_IDENTITY = ("config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


@dataclass(frozen=True)
class ReadyModel:
    """A model on disk in Hugging Face's layout. `config` is config.json; `window` the trained context."""

    name: str
    path: Path
    fingerprint: str
    config: dict[str, Any]
    source: str
    quantization: str

    @property
    def window(self) -> int:
        """Trained context length in tokens (2048 where the model does not say)."""
        text = self.config.get("text_config") or self.config
        return int(text.get("max_position_embeddings") or text.get("n_positions") or 2048)


def find(name: str | None = None, say: Say = to_stderr) -> ReadyModel:
    """The model that `name` means (the default one for None), pulled and converted when need be.

    `name`: a catalogue name, a GGUF file, a directory in Hugging Face's layout, or a hub id.
    Raises MissingInput (66), BadInput (65: damaged, pickle-only, no model), Unavailable (69),
    StorageError (74).
    """
    name = name or catalog.default()
    resolved = catalog.resolve(name)
    if isinstance(resolved, Model):
        if resolved.kind != "decoder":
            raise UsageError(f"{name} is a sentence encoder", "it cannot write answers")
        return _from_gguf(name, fetch.pull_model(resolved, say), say)
    if isinstance(resolved, str):
        return _from_hub(resolved, say)
    return _from_directory(name, resolved, say) if resolved.is_dir() else _from_file(name, resolved, say)


def find_encoder(say: Say = to_stderr) -> Path:
    """The directory of the sentence encoder, pulled when it is not installed. Raises Unavailable."""
    return fetch.pull_model(catalog.MODELS[catalog.ENCODER], say)


def _from_gguf(name: str, path: Path, say: Say) -> ReadyModel:
    from longchat_cli.models import convert

    directory = convert.ready(path, say)
    record = read_json(directory / convert.RECORD)
    config = _config(directory)
    return ReadyModel(name, directory, record["fingerprint"], config, str(path), record["quantization"])


def _from_hub(repo: str, say: Say) -> ReadyModel:
    pin = catalog.pinned(repo)
    if pin is None or not pin.path.is_dir():
        pin = fetch.pull_hub(repo, say)
    _require_weights(pin.path)
    identity = hashlib.sha256(f"{pin.repo}@{pin.revision}".encode()).hexdigest()
    return ReadyModel(repo, pin.path, identity, _config(pin.path), f"{repo}@{pin.revision}", "none")


def _from_file(name: str, path: Path, say: Say) -> ReadyModel:
    if path.suffix.lower() == ".safetensors":
        raise BadInput(f"{name} is one weights file", "its configuration is missing", "give its directory")
    if path.suffix.lower() in _PICKLES:
        raise _pickle_only(name)
    return _from_gguf(name, path, say)


def _from_directory(name: str, path: Path, say: Say) -> ReadyModel:
    if not (path / "config.json").is_file():
        files = sorted(path.glob("*.gguf"))
        if len(files) == 1:
            return _from_gguf(name, files[0], say)
        do = "name one of its .gguf files" if files else "give a GGUF file or a directory with config.json"
        raise BadInput(f"{name} is not a model directory", "it has no config.json", do)
    _require_weights(path)
    return ReadyModel(name, path, fingerprint(path), _config(path), str(path), "none")


def _require_weights(path: Path) -> None:
    if any(path.glob("*.safetensors")):
        return
    if any(file.suffix in _PICKLES for file in path.iterdir()):
        raise _pickle_only(str(path))
    raise BadInput(f"{path} holds no weights", "no .safetensors file in it")


def _pickle_only(name: str) -> BadInput:
    return BadInput(
        f"{name} has its weights only as pickle", "loading them could run code", "convert them to safetensors"
    )


def _config(path: Path) -> dict[str, Any]:
    config = read_json(path / "config.json")
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise BadInput(f"{path / 'config.json'} is damaged", "it names no model_type")
    return config


def fingerprint(path: Path) -> str:
    """A hash of everything that decides the model's numbers and tokens; weights' hashes are remembered."""
    try:
        parts = [(file, remembered_sha256(path / file, catalog.hashes_dir())) for file in _identity(path)]
    except OSError as error:
        raise MissingInput(f"{path} cannot be read", error.strerror or str(error)) from error
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def _identity(path: Path) -> list[str]:
    weights = sorted(file.name for file in path.glob("*.safetensors"))
    return [name for name in _IDENTITY if (path / name).is_file()] + weights


def pick_device(name: str = "auto") -> str:
    """'auto' -> 'cuda' where a GPU is usable, else 'cpu'; checks a device asked for by name.

    Raises UsageError (no such device name) and Unavailable (not on this machine).
    """
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    kind, _, index = name.partition(":")
    if kind not in ("cpu", "cuda", "mps") or (index and (kind != "cuda" or not index.isdigit())):
        raise UsageError(f"no device '{name}'", "", "use auto, cpu, cuda, cuda:N or mps")
    if kind == "cuda" and int(index or 0) >= torch.cuda.device_count():
        why = f"this machine has {torch.cuda.device_count()} CUDA devices that torch can use"
        raise Unavailable(f"device {name} is not available", why, "use --device cpu")
    if kind == "mps" and not torch.backends.mps.is_available():
        raise Unavailable("device mps is not available", "torch finds no Metal GPU", "use --device cpu")
    return name


def pick_dtype(name: str, device: str) -> torch.dtype:
    """'auto' -> bfloat16, or float16 on a GPU that lacks it. Raises UsageError."""
    if name == "auto":
        old = device.startswith("cuda") and not torch.cuda.is_bf16_supported(including_emulation=False)
        return torch.float16 if old else torch.bfloat16
    if name not in DTYPES:
        raise UsageError(f"no dtype '{name}'", "", f"use auto, {', '.join(DTYPES)}")
    return DTYPES[name]


def load_decoder(
    ready: ReadyModel,
    device: str = "auto",
    dtype: str = "auto",
    quantize: str | None = None,
    *,
    packed: bool = True,
    lean: bool = True,
) -> Decoder:
    """The decoder of a found model: the lean forward where it serves, else transformers.

    `device`: auto, cpu, cuda[:n], mps; `dtype`: auto or a name of DTYPES; `quantize`: None, 'none', 'int8' or
    'nf4' (bitsandbytes). `packed=False` ignores low-bit weights, `lean=False` asks for transformers.
    Raises BadInput (unknown architecture, damaged weights), UsageError, Unavailable, OutOfMemory.
    """
    from longchat_cli.models import native
    from longchat_cli.models.lean import LeanDecoder, refuses

    device = pick_device(device)
    kind = pick_dtype(dtype, device)
    if quantize not in (None, *QUANTIZATIONS):
        raise UsageError(f"no quantization '{quantize}'", "", f"use {', '.join(QUANTIZATIONS)}")
    with _memory_errors(ready):
        if quantize in ("int8", "nf4"):
            return _load_transformers(ready, device, kind, quantize)
        if lean and refuses(ready.config) is None:
            decoder = LeanDecoder.from_dir(ready.path, dtype=kind, device=device, packed=False)
            if packed and not native.serve(decoder, ready.path, ready.fingerprint):
                notes = decoder.notes
                decoder = LeanDecoder.from_dir(ready.path, dtype=kind, device=device)
                decoder.notes = notes
            return decoder
        return _load_transformers(ready, device, kind, None)


def _load_transformers(ready: ReadyModel, device: str, dtype: torch.dtype, quantize: str | None) -> HFDecoder:
    from safetensors import SafetensorError
    from transformers import AutoConfig, AutoModelForCausalLM

    from longchat_cli.attention.hf import HFDecoder
    from longchat_cli.models.convert import quiet

    kind = ready.config["model_type"]
    options: dict[str, Any] = {"use_safetensors": True, "dtype": dtype, "device_map": {"": device}}
    if quantize:
        options["quantization_config"] = _bitsandbytes(quantize, dtype)
    try:
        config = AutoConfig.from_pretrained(ready.path, local_files_only=True)
        with quiet():
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                ready.path, config=config, local_files_only=True, output_loading_info=True, **options
            )
        model, report = loaded
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except (SafetensorError, OSError) as error:
        raise BadInput(f"the weights in {ready.path} cannot be read", _first_line(error)) from error
    except (ValueError, KeyError, TypeError, AttributeError, RuntimeError, ImportError) as error:
        raise BadInput(f"{ready.name}: architecture '{kind}' cannot be loaded", _first_line(error)) from error
    if missing := sorted(report["missing_keys"]):
        raise BadInput(f"the weights in {ready.path} are incomplete", f"{missing[0]} is missing")
    return HFDecoder(model.eval())


def _bitsandbytes(quantize: str, dtype: torch.dtype) -> Any:
    from transformers import BitsAndBytesConfig

    if quantize == "int8":
        return BitsAndBytesConfig(load_in_8bit=True)
    return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype)


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]


@contextlib.contextmanager
def _memory_errors(ready: ReadyModel) -> Iterator[None]:
    try:
        yield
    except (MemoryError, torch.OutOfMemoryError) as error:
        do = "try --quantize int8 or nf4, or a smaller model"
        raise OutOfMemory(f"not enough memory for {ready.name}", _first_line(error), do) from error
