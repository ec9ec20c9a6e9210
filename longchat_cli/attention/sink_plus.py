"""StreamingLLM++: the selection of attention sinks, with full attention every few steps.

The ablation of Recycled Attention (Xu et al., ACL 2025): it isolates what an occasional look at everything
gives when the small cache is chosen by position instead of by attention. Positions are true ones.
"""

from __future__ import annotations

from dataclasses import dataclass

from longchat_cli.attention.layer import Method, Rows, Seen, option, seen_by
from longchat_cli.attention.refresh import RefreshLayer
from longchat_cli.attention.rope import Rope


@dataclass(frozen=True)
class SinkPlus(Method):
    """RefreshKV section 4, the baseline "StreamingLLM++"."""

    summary = "attention sinks that see everything every --stride steps: the ablation of recycled"
    keeps = "every token; most steps see the first --sinks and the last --window"
    forgets = "nothing; between refreshes a step sees sinks and window alone"
    cost = "reading and memory as full; most steps attend to --sinks + --window tokens"
    dense_prompts = True
    sinks: int = option(4, "first tokens that every step sees", low=0)
    window: int = option(1020, "recent tokens that every step sees", low=1, budget=1)
    stride: int = option(5, "full attention every this many steps (S)", low=1)

    def layer(self, index: int, layers: int, rope: Rope | None) -> SinkPlusLayer:
        return SinkPlusLayer(self, rope)


class SinkPlusLayer(RefreshLayer):
    def part(self, new: Rows) -> list[Seen]:
        left = max(new.end - self.method.window, 0)
        outside = min(self.method.sinks, left)
        first = [Seen(self.kv, 0, outside)] if outside else []
        return [*first, seen_by(new, self.kv, left)]
