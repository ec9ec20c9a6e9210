"""A git repository's newest files in a temporary folder, through the git binary. Off is everything that runs
what a repository brings, asks for a password or leaves https."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from longchat_cli.config import format_bytes
from longchat_cli.documents.names import printable
from longchat_cli.documents.remote import Repository
from longchat_cli.errors import BadInput, MissingInput, Unavailable

MAX_BYTES = 1 << 30
MAX_SECONDS = 600.0
_TICK = 0.1
_SETTINGS = {
    "protocol.allow": "never",
    "core.hooksPath": os.devnull,
    "core.fsmonitor": "false",
    "core.askPass": "",
    "credential.helper": "",
    "credential.interactive": "false",
    "submodule.recurse": "false",
}
_ENVIRONMENT = {"GIT_TERMINAL_PROMPT": "0", "GIT_LFS_SKIP_SMUDGE": "1", "GIT_ASKPASS": "", "LC_ALL": "C"}
_ABSENT = ("not found", "does not exist", "not appear to be", "could not read Username", "Remote branch")


@contextlib.contextmanager
def cloned(repository: Repository, protocols: Sequence[str] = ("https",)) -> Iterator[Path]:
    """The files of a repository's newest commit, removed behind the body.

    Raises Unavailable (no git, no answer, too slow), MissingInput (no such repository or branch) and BadInput
    (too large).
    """
    shown = printable(repository.url)
    git = shutil.which("git")
    if git is None:
        raise Unavailable(f"cannot read {shown}", "git is not installed", "download it as an archive")
    with tempfile.TemporaryDirectory(prefix="longchat-", ignore_cleanup_errors=True) as place:
        folder = Path(place) / "repository"
        _run([git, *_options(protocols), *_clone(repository, folder)], Path(place), shown)
        yield folder


def _options(protocols: Sequence[str]) -> list[str]:
    allowed = {f"protocol.{name}.allow": "always" for name in protocols}
    return [word for key, value in (_SETTINGS | allowed).items() for word in ("-c", f"{key}={value}")]


def _clone(repository: Repository, folder: Path) -> list[str]:
    words = ["clone", "--quiet", "--depth=1", "--single-branch", "--no-tags", "--no-recurse-submodules"]
    branch = [f"--branch={repository.ref}"] if repository.ref else []
    return [*words, *branch, "--template=", "--", repository.url, str(folder)]


def _run(command: Sequence[str], place: Path, shown: str) -> None:
    deadline = time.monotonic() + MAX_SECONDS
    log = place / "log"
    with log.open("wb") as errors:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=errors,
            stderr=errors,
            env=_environment(),
            start_new_session=True,
        )
    try:
        while process.poll() is None:
            if time.monotonic() > deadline:
                raise Unavailable(f"cannot read {shown}", f"it took longer than {MAX_SECONDS:.0f} s")
            _refuse_large(place, shown)
            time.sleep(_TICK)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # git starts helpers
        process.wait()
    _refuse_large(place, shown)
    if process.returncode:
        why = _reason(log.read_text(errors="replace"))
        kind = MissingInput if any(part in why for part in _ABSENT) else Unavailable
        raise kind(f"cannot read {shown}", why)


def _environment() -> dict[str, str]:
    """The user's, without what would point git at another repository, protocol or prompt."""
    dropped = re.compile("GIT_(?!SSL_)|SSH_ASKPASS")
    return {key: value for key, value in os.environ.items() if not dropped.match(key)} | _ENVIRONMENT


def _refuse_large(place: Path, shown: str) -> None:
    size = 0
    for folder, _, names in os.walk(place):
        for name in names:
            with contextlib.suppress(OSError):  # git renames what it is done with
                size += os.lstat(f"{folder}/{name}").st_size
    if size > MAX_BYTES:
        limit = format_bytes(MAX_BYTES)
        raise BadInput(f"{shown} is too large", f"the limit is {limit}", "clone a part of it yourself")


def _reason(output: str) -> str:
    lines = [line for line in output.splitlines() if line.startswith(("fatal:", "error:"))]
    return printable(lines[0].partition(":")[2].strip()) if lines else "git failed"
