"""PyramidKV (Cai et al., 2024): SnapKV's score, with budgets that fall linearly with depth."""

from __future__ import annotations

from dataclasses import dataclass

from longchat_cli.attention.layer import option
from longchat_cli.attention.rope import Rope
from longchat_cli.attention.snapkv import SnapKV, SnapKVLayer


@dataclass(frozen=True)
class PyramidKV(SnapKV):
    """PyramidKV section 4: beside the window 2 n - n / beta entries in the first layer, n / beta in the last,
    for a mean of n."""

    summary = "PyramidKV: as SnapKV, with more of the budget in the first layers"
    keeps = "as SnapKV; --budget is the mean over layers"
    beta: int = option(20, "the last layer has 1 / this of the mean budget", low=1)

    def layer(self, index: int, layers: int, rope: Rope | None) -> SnapKVLayer:
        layer = SnapKVLayer(self, rope)
        mean = self.budget - layer.window
        last = mean / self.beta
        depth = index / (layers - 1) if layers > 1 else 0.5
        layer.budget = layer.window + round((2 * mean - last) * (1 - depth) + last * depth)
        return layer
