"""Completion of slash commands and of what they take."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from prompt_toolkit.completion import Completer

Words = Iterable[tuple[str, str]]
"""Words with what is said beside each."""
Choices = Callable[[str | None], Words | str]
"""The names of all commands for None; for a command's name, what it takes: words, or "file"."""


def completer(choices: Choices) -> Completer:
    """For the line editor: the command's name, then its first argument. Nothing in ordinary text."""
    from prompt_toolkit.completion import Completer, Completion, PathCompleter
    from prompt_toolkit.document import Document

    class Commands(Completer):
        def get_completions(self, document: Document, event: Any) -> Iterable[Completion]:
            text = document.text_before_cursor
            if not text.startswith("/") or text.startswith("//") or "\n" in text:
                return
            name, blank, argument = text[1:].partition(" ")
            found = choices(name if blank else None)
            word = argument.rpartition(" ")[2] if blank else name
            if isinstance(found, str):
                files = PathCompleter(expanduser=True)
                yield from files.get_completions(Document(argument, len(argument)), event)
                return
            for choice, about in found:
                if choice.startswith(word):
                    yield Completion(choice, -len(word), display_meta=about)

    return Commands()
