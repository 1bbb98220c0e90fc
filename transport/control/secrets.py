"""Reads files that hold a secret, and refuses those that others can read. Knows nothing of what is in them."""

from __future__ import annotations

import os
from pathlib import Path

from layouts.errors import config_error

MAX_SECRET_BYTES = 1 << 16


def read_secret(path: Path, remedy: str) -> bytes:
    """Return what is in the file. `remedy` says how to make one.

    Raises:
        ConfigError: it is missing, unreadable, no file, larger than MAX_SECRET_BYTES, or open to group or others.
    """
    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode & 0o777
            data = file.read(MAX_SECRET_BYTES + 1)
    except OSError as error:
        raise config_error(
            f"secret file {path}", got=error.strerror, allowed="a file that this user can read", remedy=remedy
        ) from error
    if mode & 0o077:
        raise config_error(
            f"mode of {path}",
            got=f"{mode:04o}",
            allowed="0600 or 0400: a secret is for its owner alone",
            remedy=f"Run: chmod 600 {path}",
        )
    if len(data) > MAX_SECRET_BYTES:
        raise config_error(f"secret file {path}", got="more", allowed=f"up to {MAX_SECRET_BYTES} bytes", remedy=remedy)
    return data
