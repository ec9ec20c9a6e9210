"""Recall (ours): find the passages that matter in a long text, read those again inside the window.

Recycled Attention's idea at the scale of a document. What is read is read with full attention; the finding
is in `longchat_cli.recall`, and `longchat_cli.ask` joins the two. In a chat the state is that of attention
sinks, and `longchat_cli.memory` finds what they have forgotten.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from longchat_cli.attention.full import Full
from longchat_cli.attention.layer import Method, option
from longchat_cli.attention.sink import EVICT, Sink

FINDERS = ("fused", "lexical", "semantic", "attention")


@dataclass(frozen=True)
class Recall(Full):
    """Ranks passages by `find`, reads the best `passages` with `margin` tokens around each."""

    summary = "recall: finds the passages that matter, reads them again with full attention"
    keeps = "the text itself and a search index; the passages read are the answer's sources"
    forgets = "nothing, but an answer rests on the passages found: wrong ones, wrong answer"
    cost = "indexing once, linear in length; each question reads a few short passages"
    unlimited = True
    find: str = option(
        "fused",
        "what ranks passages: sentence meaning and words together, either alone, or the model's attention",
        choices=FINDERS,
    )
    passages: int = option(0, "passages read per question; 0: as calibrated for the model", low=0)
    margin: int = option(-1, "tokens of text kept around a passage; -1: as calibrated", low=-1)
    sinks: int = option(4, "in a chat: first tokens that stay", low=0)
    window: int = option(0, "in a chat: recent tokens that stay [there 1020]", low=0)
    evict: str = option("tokens", "in a chat: what goes at a time", choices=EVICT)

    @classmethod
    def build(cls, options: Mapping[str, Any]) -> Method:
        """Of a chat, which has a window, attention sinks with the same options."""
        built = super().build(options)
        return Remembering(**options) if options.get("window") else built


@dataclass(frozen=True)
class Remembering(Sink):
    """Attention sinks in a chat whose forgotten turns are found again."""

    find: str = option("fused", "as for Recall", choices=FINDERS)
    passages: int = option(0, "as for Recall", low=0)
    margin: int = option(-1, "as for Recall", low=-1)
