"""Attention methods. A new one is a file in this folder and a line in `METHODS`; importing this is cheap."""

from __future__ import annotations

import difflib
import importlib
from typing import TYPE_CHECKING

from longchat_cli.errors import UsageError

if TYPE_CHECKING:
    from longchat_cli.attention.layer import Method

METHODS: dict[str, str] = {
    "full": "full:Full",
    "window": "window:Window",
    "truncate": "truncate:Truncate",
    "recompute": "recompute:Recompute",
    "sink": "sink:Sink",
    "sink++": "sink_plus:SinkPlus",
    "lm-infinite": "lm_infinite:LMInfinite",
    "recycled": "recycled:Recycled",
    "snapkv": "snapkv:SnapKV",
    "pyramidkv": "pyramidkv:PyramidKV",
    "h2o": "h2o:H2O",
    "tova": "tova:TOVA",
    "keydiff": "keydiff:KeyDiff",
    "quest": "quest:Quest",
    "minference": "minference:MInference",
    "pyramidinfer": "pyramidinfer:PyramidInfer",
    "cca": "cca:CCA",
    "infllm": "infllm:InfLLM",
    "recall": "recall:Recall",
}


def method_class(name: str) -> type[Method]:
    """The method's dataclass; its fields are the method's options. Raises UsageError for an unknown name."""
    if name not in METHODS:
        close = difflib.get_close_matches(name, METHODS, 1)
        hint = f"did you mean '{close[0]}'?" if close else f"choose from {', '.join(METHODS)}"
        raise UsageError(f"no method '{name}'", "", hint)
    module, attribute = METHODS[name].split(":")
    return getattr(importlib.import_module(f"{__name__}.{module}"), attribute)
