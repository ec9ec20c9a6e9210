"""An engine without a model, for tests of what stands on engines: real prompts, scripted answers.

Run as a program it is `longchat` over that engine: `python fakes.py TOKENIZER_DIR STEP,LOADING ARGUMENT...`
with the seconds that a step and loading take.
"""

from __future__ import annotations

import importlib
import sys
import time
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from longchat_cli.engine import Coverage, EngineInfo, Piece, Progress
from longchat_cli.prompt import Assembler, Message, Prompt
from longchat_cli.sampling import Sampling
from longchat_cli.tokens import Tokenizer

CHUNK = 16


class FakeEngine:
    """Answers `You said: ...` with the user's last text. `ids` is the state, `prefilled` counts."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        method: str = "full",
        options: Mapping[str, Any] | None = None,
        window: int = 512,
        delay: float = 0.0,
    ) -> None:
        self.tokenizer, self.assembler = tokenizer, Assembler(tokenizer)
        self.options, self.delay = dict(options or {}), delay
        known = {"find": "lexical", "passages": 0, "sinks": 4} if method == "recall" else {}
        told = {**known, **self.options}
        self.info = EngineInfo("fake", window, method, "cpu", "float32", "0", options=told)
        self.ids: list[int] = []
        self.prefilled = 0
        self.failure: Exception | None = None
        self.stepper = None
        self.reply: Callable[[str], str] = lambda said: f"You said: {said}"

    @property
    def thinking(self) -> Any:
        return self.assembler.thinking

    def count(self, text: str) -> int:
        return len(self.encode(text))

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text)

    def render(self, messages: Sequence[Message], *, answer: bool = True) -> Prompt:
        return self.assembler.render(messages, answer=answer)

    def render_turn(self, message: Message) -> Prompt:
        return self.assembler.turn(message)

    def prefill(
        self, ids: Sequence[int], progress: Progress | None = None, cancel: Callable[[], bool] | None = None
    ) -> int:
        done = 0
        while done < len(ids) and not (cancel and cancel()):
            part = ids[done : done + CHUNK]
            self.ids += part
            self.prefilled += len(part)
            done += len(part)
            time.sleep(self.delay)
            if self.failure:
                raise self.failure
            if progress:
                progress(done, len(ids))
        return done

    def read(
        self,
        ids: Sequence[int],
        store: Any,
        *watching: Any,
        turns: Sequence[Sequence[int]] = (),
        pinned: Any = (),
        subjects: Any = (),
    ) -> tuple[int, int]:
        return self.prefill([*ids, *(id for turn in turns for id in turn)], *watching), 0

    def keep(self, shared: int = 0) -> None:
        pass

    def generate(
        self, sampling: Sampling, cancel: Callable[[], bool] | None = None, said: Any = ()
    ) -> Iterator[Piece]:
        decoder = self.tokenizer.decoder()
        answer = self.tokenizer.encode(self.reply(self.said()))
        for id in answer[: sampling.max_tokens]:
            if cancel and cancel():
                yield Piece(decoder.flush(), stop="cancelled")
                return
            time.sleep(self.delay)
            self.ids.append(id)
            yield Piece(decoder.push(id), (id,))
        yield Piece(decoder.flush(), stop="eos" if len(answer) <= sampling.max_tokens else "length")

    def said(self) -> str:
        """The last user's text in the state, its last paragraph without the label."""
        text = self.assembler.show(Prompt(self.ids)).split("user\n")[-1]
        return text.split("⟦")[0].split("\n\n")[-1].removeprefix("Question: ")

    def coverage(self) -> Coverage:
        budget = len(self.ids)
        if self.info.method == "sink":
            budget = self.options.get("sinks", 4) + self.options.get("window", 1020)
        visible = min(len(self.ids), budget)
        forgotten = len(self.ids) - visible
        recent = forgotten + self.options.get("sinks", 4) if forgotten else 0
        return Coverage(len(self.ids), visible, forgotten, 8 * visible, recent)

    def begin_turn(self, ids: Sequence[int], forget: bool = False) -> None:
        pass

    def pin(self, start: int, stop: int, on: bool = True) -> bool:
        return self.info.method != "sink"

    def snapshot(self) -> Any:
        return list(self.ids)

    def restore(self, mark: Any) -> None:
        self.ids = list(mark)

    def reset(self) -> None:
        self.ids = []

    def save(self, path: Path) -> None:
        raise NotImplementedError

    def load(self, path: Path) -> None:
        raise NotImplementedError


class Opener:
    """An `Open` that remembers the engines it made."""

    def __init__(
        self, tokenizer: Tokenizer, window: int = 512, delay: float = 0.0, loading: float = 0.0
    ) -> None:
        self.tokenizer, self.window, self.delay, self.loading = tokenizer, window, delay, loading
        self.engines: list[FakeEngine] = []

    def __call__(self, method: str, options: Mapping[str, Any]) -> FakeEngine:
        if self.loading:
            print("loading", file=sys.stderr)
            time.sleep(self.loading)
        engine = FakeEngine(self.tokenizer, method, options, self.window, self.delay)
        self.engines.append(engine)
        return engine

    @property
    def last(self) -> FakeEngine:
        return self.engines[-1]


def install(opener: Opener, patch: Callable[[Any, str, Any], None] = setattr) -> None:
    """Let the command line use the fake."""
    local = importlib.import_module("longchat_cli.local")
    patch(local, "open_engine", lambda model, method, options, **rest: opener(method, options))
    patch(local, "with_method", lambda engine, method, options=None: opener(method, options or {}))


@dataclass(frozen=True)
class FakeFull:
    """The method that ends with the window."""

    forgets = "nothing"
    unlimited = False


@dataclass(frozen=True)
class FakeMethod:
    """What is asked of a method's class, without torch."""

    forgets = "everything between"
    unlimited = True
    sinks: int = 4
    window: int = 1020


def without_torch() -> None:
    """Keep a subprocess quick to start."""
    from longchat_cli import attention

    sys.modules["longchat_cli.local"] = types.ModuleType("longchat_cli.local")
    attention.method_class = lambda name: FakeFull if name == "full" else FakeMethod  # type: ignore[assignment]


if __name__ == "__main__":
    from longchat_cli.__main__ import main

    without_torch()
    step, loading = map(float, sys.argv[2].split(","))
    install(Opener(Tokenizer.from_dir(sys.argv[1]), 2048, step, loading))
    del sys.argv[1:3]
    sys.exit(main())
