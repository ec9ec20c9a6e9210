"""Options under which a text of some forty tokens is beyond a method's budget.

Methods not named scale themselves (`Method.at_budget`).
"""

from typing import Any

SMALL: dict[str, dict[str, Any]] = {
    "window": {"window": 9},
    "sink": {"sinks": 3, "window": 9},
    "sink++": {"sinks": 3, "window": 9, "stride": 5},
    "cca": {"group": 4, "local": 6, "sinks": 3},
    "infllm": {"init": 3, "local": 8, "block": 4, "topk": 2, "representatives": 2},
    "recycled": {"fraction": 4, "stride": 5},
    "truncate": {"budget": 10},
    "recompute": {"window": 9, "stride": 3},
    "lm-infinite": {"sinks": 3, "window": 9},
    "snapkv": {"budget": 12, "window": 4},
    "pyramidkv": {"budget": 12, "window": 4},
    "h2o": {"budget": 12},
    "tova": {"budget": 12},
    "keydiff": {"budget": 12},
    "quest": {"budget": 12, "page": 4, "dense": 0},
    "pyramidinfer": {"ratio": 0.5, "recent": 0.1, "least": 3},
}
