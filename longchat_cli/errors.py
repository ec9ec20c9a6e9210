"""Errors that reach the user: what happened, why, what to do, and the exit code for scripts."""

import errno

DISK_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


class LongchatError(Exception):
    """An expected failure. Printed as one line on stderr; `exit_code` is the process's exit status.

    `what` happened, `why`, and what to `do` about it; `why` and `do` may be empty.
    """

    exit_code = 1

    def __init__(self, what: str, why: str = "", do: str = "") -> None:
        self.what, self.why, self.do = what, why, do
        super().__init__(what)

    def __str__(self) -> str:
        line = self.what + (f": {self.why}" if self.why else "")
        line += f"; {self.do}" if self.do else ""
        return one_line(line)


def one_line(text: str) -> str:
    """`text` on one line, control characters as backslash escapes: it may quote what others wrote."""
    line = " ".join(text.split())
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in line)


class UsageError(LongchatError):
    """The command line does not make sense (exit 2)."""

    exit_code = 2


class ContextOverflow(LongchatError):
    """The prompt and answer do not fit the model's window (exit 3)."""

    exit_code = 3


class InputsSkipped(LongchatError):
    """Not every input could be read, and --strict asks for all (exit 4)."""

    exit_code = 4


class Unsupported(LongchatError):
    """The documents do not say what an answer says, and --strict-cite asks for it (exit 5)."""

    exit_code = 5


class OverTokenBudget(LongchatError):
    """The texts have more tokens than --token-budget allows (exit 6)."""

    exit_code = 6


class BadInput(LongchatError):
    """Input data is damaged or of the wrong kind (exit 65)."""

    exit_code = 65


class NoText(BadInput):
    """An input is empty: nothing is lost where there are others."""


class MissingInput(LongchatError):
    """An input does not exist or cannot be read (exit 66)."""

    exit_code = 66


class Unavailable(LongchatError):
    """A model or endpoint cannot be had (exit 69)."""

    exit_code = 69


class CannotCreate(LongchatError):
    """An output cannot be created (exit 73)."""

    exit_code = 73


class StorageError(LongchatError):
    """Reading or writing failed half way, e.g. disk full (exit 74)."""

    exit_code = 74


class OutOfMemory(LongchatError):
    """Not enough memory for the model or its cache (exit 75)."""

    exit_code = 75


class BadConfig(LongchatError):
    """A configuration value is wrong (exit 78)."""

    exit_code = 78
