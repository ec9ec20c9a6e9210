"""KeyDiff (Park et al., 2025): after a prompt, the entries whose keys are least like the others."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional as F

from longchat_cli.attention.evict import Evicting, EvictingLayer
from longchat_cli.attention.layer import Step
from longchat_cli.attention.rope import Rope


@dataclass(frozen=True)
class KeyDiff(Evicting):
    """KeyDiff's score over a prompt read whole. What is generated is added, and judged after the next one."""

    summary = "KeyDiff: keeps keys that differ from the others, whatever is asked"
    keeps = "the --budget entries of the prompt with keys least like the mean direction; all generated"
    forgets = "the rest, for good: among alike keys, the most typical first"
    cost = "reading as full; then memory and step time by --budget and what is generated"

    def layer(self, index: int, layers: int, rope: Rope | None) -> KeyDiffLayer:
        return KeyDiffLayer(self, rope)


class KeyDiffLayer(EvictingLayer):
    def weigh(self, new: Step) -> Tensor:
        # float32: cosines of many alike keys are closer together than bfloat16 tells apart.
        directions = F.normalize(self.kv.k.float(), dim=-1)
        return -F.cosine_similarity(directions, directions.mean(1, keepdim=True), dim=-1)
