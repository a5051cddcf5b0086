# SPDX-License-Identifier: Apache-2.0
"""A file under its final name only when it is whole, whatever happens on the way."""
from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
from typing import IO, Any, Iterator

from .errors import KestrelError


def resolved(path: str) -> str:
    """Where `path` leads: behind a link its target. KestrelError where something other than a regular file stands, or no folder is."""
    target = os.path.realpath(path)
    try:
        mode = os.stat(target).st_mode
    except FileNotFoundError:
        mode = None
    except OSError as error:
        raise KestrelError(f"{path}: {error.strerror or error}") from None
    if mode is not None and not stat.S_ISREG(mode):     # a device or a pipe would be replaced by a file
        found = "a folder" if stat.S_ISDIR(mode) else "a device, pipe or socket"
        raise KestrelError(f"{path}: expected a regular file or a new name, found {found}")
    folder = os.path.dirname(target)
    if not os.path.isdir(folder):
        raise KestrelError(f"{path}: the folder {folder} does not exist")
    return target


_PREFIX = ".kestrel-"


def _locked(folder: str) -> int:
    """A descriptor of the folder that holds its lock, -1 when another process does. The kernel takes the lock from a process that is killed."""
    place = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(place, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(place)
        return -1
    return place


def _sweep(parent: str) -> None:
    """Takes away what killed processes left behind."""
    for name in os.listdir(parent):
        folder = os.path.join(parent, name)
        if name.startswith(_PREFIX) and not os.path.islink(folder) and os.path.isdir(folder):
            with contextlib.suppress(OSError):      # somebody else's, or gone meanwhile
                place = _locked(folder)
                if place >= 0:
                    shutil.rmtree(folder, ignore_errors=True)
                    os.close(place)


@contextlib.contextmanager
def beside(path: str) -> Iterator[str]:
    """A new name on the disk of `path`, of nobody else's, for a file that goes when the block ends."""
    target = resolved(path)
    parent = os.path.dirname(target)
    try:
        _sweep(parent)
        place = -1
        while place < 0:    # another process's sweep may come between the two
            folder = tempfile.mkdtemp(prefix=_PREFIX, dir=parent)
            with contextlib.suppress(FileNotFoundError):
                place = _locked(folder)
    except OSError as error:
        raise KestrelError(f"{path}: {error.strerror or error}") from None
    try:
        yield os.path.join(folder, os.path.basename(target))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(place)


@contextlib.contextmanager
def new_file(path: str) -> Iterator[IO[Any]]:
    """A binary file open for writing that takes the place of `path` when the block ends well, and otherwise leaves nothing.

    It is written in the same folder under a name of its own, so that two writers of one path both end whole. An OSError in the block
    (a full disk) becomes a KestrelError naming `path`.
    """
    target = resolved(path)
    with beside(path) as fresh:
        try:
            with open(fresh, "wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            os.replace(fresh, target)
        except OSError as error:
            raise KestrelError(f"{path}: {error.strerror or error}") from None
