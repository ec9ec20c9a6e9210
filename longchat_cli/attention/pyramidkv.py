"""PyramidKV (Cai et al., 2024): SnapKV's score, with budgets that fall linearly with depth."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from longchat_cli.attention.layer import Layer, option
from longchat_cli.attention.snapkv import SnapKV


@dataclass(frozen=True)
class PyramidKV(SnapKV):
    """PyramidKV section 4: beside the window 2 n - n / beta entries in the first layer, n / beta in the last,
    for a mean of n."""

    summary = "PyramidKV: as SnapKV, with more of the budget in the first layers"
    keeps = "as SnapKV; --budget is the mean over layers"
    beta: int = option(20, "the last layer has 1 / this of the mean budget", low=1)

    def link(self, layers: Sequence[Layer]) -> None:
        # Depth counts these layers alone: those of other kinds share no budget.
        for index, layer in enumerate(layers):
            depth = index / (len(layers) - 1) if len(layers) > 1 else 0.5
            layer.budget = self._budget(depth)  # type: ignore[attr-defined]

    def _budget(self, depth: float) -> int:
        """Entries that the layer at `depth`, 0 to 1, keeps."""
        window = min(self.window, self.budget)
        mean = self.budget - window
        last = mean / self.beta
        return window + round((2 * mean - last) * (1 - depth) + last * depth)
