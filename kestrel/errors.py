# SPDX-License-Identifier: Apache-2.0
"""The one exception for everything that came from outside and is not as it must be."""
from __future__ import annotations

_LONGEST = 1000  # characters of a message


class KestrelError(Exception):
    """A file, an argument or a request can't be served.

    The message is one line that names the file, the tensor or key, what was expected and what was found;
    the command line prints it and exits with 2.
    """

    def __init__(self, message: str):
        # A message quotes foreign text (a key, a template's own words): newlines in it must not make two lines, nor escapes move a terminal's cursor.
        line = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in " ".join(str(message).split()))
        super().__init__(line if len(line) <= _LONGEST else f"{line[:_LONGEST - 250]} ... {line[-240:]}")
