"""Directories of longchat processes that are measured: the user's, but for what they are to begin without."""

from __future__ import annotations

from pathlib import Path


def linked(folder: Path, own: Path, without: str) -> Path:
    """Make `folder` a directory that has all of the user's `own` but what is called `without`; `folder`."""
    folder.mkdir()
    for entry in own.iterdir() if own.exists() else ():
        if entry.name != without:
            (folder / entry.name).symlink_to(entry.resolve())
    return folder
