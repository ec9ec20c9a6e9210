"""`longchat doctor`: what runs on this machine, and why the rest does not."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from pathlib import Path
from typing import Any

from longchat_cli import __version__, config
from longchat_cli.errors import LongchatError
from longchat_cli.terminal_text import table

PACKAGES = (
    "torch",
    "transformers",
    "bitsandbytes",
    "tokenizers",
    "tiktoken",
    "gguf",
    "safetensors",
    "huggingface-hub",
    "prompt-toolkit",
    "click",
    "triton",
    "flash-attn",
)


def examine() -> dict[str, Any]:
    """A report ready for JSON: python, packages, device, kernels, model, tokenizer, directories."""
    return {
        "longchat": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: _version(name) for name in PACKAGES},
        "device": _device(),
        "kernels": _kernels(),
        "model": _model(),
        "directories": _directories(),
        "offline": config.offline(),
    }


def show(report: dict[str, Any]) -> str:
    """The report as text, one finding a line."""
    device, model = report["device"], report["model"]
    lines = [
        f"longchat {report['longchat']}, Python {report['python']}, {report['platform']}",
        f"device: {device['name']}, {device['threads']} threads, CPU capability {device['cpu_capability']}",
        f"OMP_WAIT_POLICY: {device['omp_wait_policy'] or 'not set'}",
        "kernels:",
        *(
            f"  {'yes' if kernel['serves'] else 'no ':<3} {kernel['name']}: {kernel['reason']}"
            for kernel in report["kernels"]
        ),
        f"model: {model['name']} ({'installed' if model['installed'] else 'not pulled yet'})",
        f"tokenizer: {model['tokenizer']}",
        f"network: {'forbidden (offline)' if report['offline'] else 'allowed when a model is missing'}",
        "directories:",
        *(f"  {name}: {place['path']} ({place['state']})" for name, place in report["directories"].items()),
        "packages:",
        *(f"  {name} {version or 'not installed'}" for name, version in report["packages"].items()),
    ]
    return "\n".join(lines)


def kernel_costs() -> list[dict[str, Any]]:
    """What a block of each Triton kernel takes of an SM, compiled here and now; `kernels.aot.report`.

    Raises Unavailable where triton is not installed.
    """
    from longchat_cli.kernels import aot

    return aot.report(quick=True)


def show_costs(rows: list[dict[str, Any]]) -> str:
    """The costs as a table, a kernel and target a line."""
    header = ("kernel", "target", "registers", "shared KiB", "occupancy", "spills", "tensor cores", "check")
    return table(
        header,
        (
            (
                row["kernel"],
                row["target"],
                str(row["registers"]),
                f"{row['shared_bytes'] / 1024:.1f}",
                f"{row['occupancy']:.0%}",
                str(row["spills"]),
                row["instruction"] or "-",
                "; ".join(row["faults"]) or "ok",
            )
            for row in rows
        ),
    )


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _device() -> dict[str, Any]:
    import torch

    cuda = torch.cuda.is_available()
    mps = torch.backends.mps.is_available()
    name = torch.cuda.get_device_name() if cuda else "Apple GPU" if mps else "CPU"
    return {
        "name": name,
        "kind": "cuda" if cuda else "mps" if mps else "cpu",
        "threads": torch.get_num_threads(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "omp_wait_policy": os.environ.get("OMP_WAIT_POLICY"),
    }


def _kernels() -> list[dict[str, Any]]:
    from longchat_cli import kernels

    return [{"name": name, "serves": serves, "reason": reason} for name, serves, reason in kernels.report()]


def _model() -> dict[str, Any]:
    """The default model; nothing is pulled or converted for a report."""
    from longchat_cli.models import catalog

    name = catalog.default()
    try:
        installed = bool(catalog.info(name)["installed"])
        tokenizer = _tokenizer(name) if installed else "known once the model is here"
    except LongchatError as error:
        installed, tokenizer = False, str(error)
    return {"name": name, "installed": installed, "tokenizer": tokenizer}


def _tokenizer(name: str) -> str:
    from longchat_cli.models import load
    from longchat_cli.tokens import Tokenizer

    return Tokenizer.from_dir(load.find(name).path).fast_reason


def _directories() -> dict[str, dict[str, str]]:
    places = {"data": config.data_dir(), "cache": config.cache_dir(), "state": config.state_dir()}
    return {name: {"path": str(path), "state": _state(path)} for name, path in places.items()}


def _state(path: Path) -> str:
    """Permissions of a directory of ours, or whether it can be made."""
    if not path.exists():
        parent = next(place for place in path.absolute().parents if place.exists())
        return "not there yet" if os.access(parent, os.W_OK) else f"cannot be made: {parent} is not writable"
    if not path.is_dir():
        return "is not a directory"
    mode = path.stat().st_mode & 0o777
    open_to_others = ", readable by others" if mode & 0o077 else ""
    return f"{mode:04o}{'' if os.access(path, os.W_OK) else ', not writable'}{open_to_others}"
