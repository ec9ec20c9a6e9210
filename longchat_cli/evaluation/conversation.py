"""Does a conversation without end stay as good as a fresh one?

Prompts of two turns (MT-bench: Zheng et al., NeurIPS 2023) are typed one after the other at the prompt of one
`longchat chat` in a terminal. Each answer is compared with the one that a chat of these two turns alone gets:
how much it repeats itself, how much of it earlier answers said, and its perplexity where only these turns are
seen, with full attention.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from longchat_cli.chat import Conversation
from longchat_cli.errors import UsageError
from longchat_cli.evaluation.haystack import load_records
from longchat_cli.evaluation.journal import Journal, Row
from longchat_cli.evaluation.perplexity import Forward, losses
from longchat_cli.evaluation.typed import Said, Typed
from longchat_cli.prompt import Message
from longchat_cli.sampling import Sampling
from longchat_cli.terminal_text import table

GRAM = 4
"""Tokens of a phrase, when repetition is counted; words of one, when copies of other answers are."""
PARTS = 4
"""The conversation is looked at in so many parts."""
FRESH = "fresh chats"


@dataclass(frozen=True)
class Bench:
    """What is needed of a model: `converse` opens a conversation under a method (None: the one evaluated),
    `typed` a chat in a terminal under that one, which samples like all (`sampling`); `forward` gives the
    decoder with full attention and an empty state."""

    converse: Callable[[str | None], Conversation]
    typed: Callable[[], AbstractContextManager[Typed]]
    forward: Callable[[], Forward]
    sampling: Sampling


def conversation(
    bench: Bench, data: Sequence[Path], journal: Journal, progress: Callable[[int, int], None]
) -> dict[str, Any]:
    """{"samples": [...], "totals": [...]}: a sample is an answer, a total a part of the conversation.

    What `journal` has is not asked again; a conversation that was broken off begins anew. Raises UsageError
    without prompts, and as `Typed` does.
    """
    prompts = [record["turns"] for record in load_records(data, "turns")]
    if not prompts:
        raise UsageError(
            "conversation needs prompts", "", 'name a file of {"turns": [...]} lines with --data'
        )
    total = 2 * sum(map(len, prompts))
    done = len(journal.where(method=FRESH))
    for number, turns in enumerate(prompts):
        if not journal.where(method=FRESH, number=number):
            chat = bench.converse("full")
            for row in _judged(bench, turns, [_said(bench, chat, text) for text in turns]):
                journal.add({"method": FRESH, "number": number, **row})
                done += 1
                progress(done, total)
    method = _named(bench.converse(None))
    if len(journal.where(method=method)) < total // 2:
        rows = []
        with bench.typed() as typed:
            for number, turns in enumerate(prompts):
                judged = _judged(bench, turns, [typed.say(text) for text in turns])
                rows += [{"number": number, **row} for row in judged]
                progress(total // 2 + len(rows), total)
        for row in rows:
            journal.add({"method": method, **row})
    return {"samples": journal.rows, "totals": totals(journal.rows)}


def _named(chat: Conversation) -> str:
    info = chat.engine.info
    shown = {name: info.options[name] for name in ("window", "evict") if name in info.options}
    return " ".join([info.method, *(f"{name}={value}" for name, value in shown.items())])


def _said(bench: Bench, chat: Conversation, text: str) -> Said:
    """The answer of a conversation in this process."""
    list(chat.send(text, bench.sampling))
    state = chat.coverage()
    user, answer = chat.turns[-2:]
    return Said(user, answer, state.seen, state.bytes)


def _judged(bench: Bench, turns: Sequence[str], said: Sequence[Said]) -> list[Row]:
    """What was `said` to `turns`, judged where only these are seen."""
    chat = bench.converse("full")
    rows: list[Row] = []
    seen: list[int] = []
    places = []
    for place, (text, given) in enumerate(zip(turns, said, strict=True)):
        user, answer = Message.of("user", text), given.answer
        prompt = chat.engine.render_turn(user) if place else chat.engine.render([user])
        seen += prompt.ids
        places.append((len(seen), len(seen) + len(answer.ids)))
        seen += answer.ids
        rows.append(
            {
                "place": place,
                "tokens": len(answer.ids),
                "stop": answer.stop,
                "repeated": round(repeated(answer.ids), 4),
                "seen": given.seen,
                "bytes": given.bytes,
                "resident": given.resident,
                "recalled": given.recalled,
                "subject": given.user.subject,
                "answer": answer.text,
            }
        )
    values = [loss for part in losses(bench.forward(), seen) for loss in part]  # of all tokens but the first
    for row, (begin, end) in zip(rows, places, strict=True):
        row["loss"] = round(math.fsum(values[begin - 1 : end - 1]), 4)
    return rows


def repeated(ids: Sequence[int]) -> float:
    """The share of phrases of GRAM tokens that occurred before in the same answer."""
    grams = [tuple(ids[i : i + GRAM]) for i in range(len(ids) - GRAM + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def copied(rows: Sequence[Row]) -> list[float]:
    """For each answer the share of its phrases of GRAM words that an answer to an earlier prompt has."""
    shares = []
    before: set[tuple[str, ...]] = set()  # of earlier prompts
    latest: set[tuple[str, ...]] = set()  # of this one, whose turns may well say the same
    for last, row in zip([None, *rows], rows, strict=False):
        if last and last["number"] != row["number"]:
            before, latest = before | latest, set()
        words = row["answer"].lower().split()
        phrases = [tuple(words[i : i + GRAM]) for i in range(len(words) - GRAM + 1)]
        shares.append(sum(phrase in before for phrase in phrases) / max(len(phrases), 1))
        latest.update(phrases)
    return shares


def totals(rows: Sequence[Row]) -> list[Row]:
    """For each method and part of the conversation: repetition, copies and perplexity, theirs and of fresh
    chats."""
    made = []
    alone = [row for row in rows if row["method"] == FRESH]
    fresh = {
        (row["number"], row["place"]): {**row, "copied": share}
        for row, share in zip(alone, copied(alone), strict=True)
    }
    for method in dict.fromkeys(row["method"] for row in rows if row["method"] != FRESH):
        of = [row for row in rows if row["method"] == method]
        of = [{**row, "copied": share} for row, share in zip(of, copied(of), strict=True)]
        size = -(-len(of) // PARTS)
        for part in range(0, len(of), size):
            mine = of[part : part + size]
            theirs = [fresh[row["number"], row["place"]] for row in mine]
            made.append(
                {
                    "method": method,
                    "part": part // size + 1,
                    "answers": len(mine),
                    "seen": mine[-1]["seen"],
                    "bytes": mine[-1]["bytes"],
                    "resident": mine[-1]["resident"],
                    "recalled": sum(row["recalled"] for row in mine),
                    "subjects": sum(row["subject"] for row in mine),
                    "repeated": _mean(row["repeated"] for row in mine),
                    "repeated_fresh": _mean(row["repeated"] for row in theirs),
                    "copied": _mean(row["copied"] for row in mine),
                    "copied_fresh": _mean(row["copied"] for row in theirs),
                    "perplexity": _perplexity(mine),
                    "perplexity_fresh": _perplexity(theirs),
                }
            )
    return made


def _mean(values: Any) -> float:
    values = list(values)
    return math.fsum(values) / max(len(values), 1)


def _perplexity(rows: Sequence[Row]) -> float:
    return math.exp(math.fsum(row["loss"] for row in rows) / max(sum(row["tokens"] for row in rows), 1))


def show(result: dict[str, Any]) -> str:
    """A line for each part of each conversation."""
    header = ["method, part", "tokens seen", "repeated", "fresh", "copied", "fresh", "perplexity", "fresh"]
    rows = [
        [
            f"{t['method']}, {t['part']}",
            f"{t['seen']:,}",
            f"{t['repeated']:.1%}",
            f"{t['repeated_fresh']:.1%}",
            f"{t['copied']:.1%}",
            f"{t['copied_fresh']:.1%}",
            f"{t['perplexity']:.3f}",
            f"{t['perplexity_fresh']:.3f}",
            str(t["recalled"]),
            str(t["subjects"]),
            f"{t['bytes'] / 1e6:.1f}",
            f"{t['resident'] / 1e6:,.0f}",
        ]
        for t in result["totals"]
    ]
    return table([*header, "recalled", "subjects", "MB", "process"], rows)
