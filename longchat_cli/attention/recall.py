"""Recall (ours): find the passages that matter in a long text, read those again inside the window.

Recycled Attention's idea at the scale of a document. What is read is read with full attention; the finding
is in `longchat_cli.recall`, and `longchat_cli.ask` joins the two.
"""

from __future__ import annotations

from dataclasses import dataclass

from longchat_cli.attention.full import Full
from longchat_cli.attention.layer import option


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
        choices=("fused", "lexical", "semantic", "attention"),
    )
    passages: int = option(0, "passages read per question; 0: as calibrated for the model", low=0)
    margin: int = option(-1, "tokens of text kept around a passage; -1: as calibrated", low=-1)
