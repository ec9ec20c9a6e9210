"""How the next token is chosen: options only, so that it imports neither torch nor transformers."""

from __future__ import annotations

import math
from dataclasses import dataclass

from longchat_cli.errors import UsageError

CUT = {"loop": "the answer repeated itself and was ended", "length": "the answer was cut at --max-tokens"}
"""What is said of an answer that stopped for such a reason."""


@dataclass(frozen=True)
class Sampling:
    """Greedy when `temperature` is 0. `top_p`, `top_k` and `min_p` are off at 1, 0 and 0. `start_penalty` is
    what a token's logit loses for each earlier answer that began with it, at the same place.

    `max_tokens` bounds the answer; `stop` strings end it and are not printed. With a `schema` (the text of a
    JSON Schema, from `constrain.read_schema`) only JSON that it allows is written.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    start_penalty: float = 0.0
    seed: int | None = None
    max_tokens: int = 512
    stop: tuple[str, ...] = ()
    schema: str = ""

    def __post_init__(self) -> None:
        _require(
            0 <= self.temperature < math.inf, "--temperature", self.temperature, "at least 0, and finite"
        )
        _require(0 < self.top_p <= 1, "--top-p", self.top_p, "above 0 and at most 1")
        _require(self.top_k >= 0, "--top-k", self.top_k, "at least 0")
        _require(0 <= self.min_p < 1, "--min-p", self.min_p, "from 0 to below 1")
        # Beyond these, logits leave float32.
        penalty = self.repetition_penalty
        _require(0.01 <= penalty <= 100, "--repetition-penalty", penalty, "from 0.01 to 100")
        _require(0 <= self.start_penalty <= 100, "--start-penalty", self.start_penalty, "from 0 to 100")
        _require(self.seed is None or 0 <= self.seed < 1 << 64, "--seed", self.seed, "from 0 to 2^64 - 1")
        _require(0 < self.max_tokens <= 10**9, "--max-tokens", self.max_tokens, "from 1 to 1,000,000,000")


def _require(holds: bool, option: str, value: object, wanted: str) -> None:
    if not holds:
        raise UsageError(f"{option} is {value}", f"it must be {wanted}")
