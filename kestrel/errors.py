# SPDX-License-Identifier: Apache-2.0
"""The one exception for everything that came from outside and is not as it must be."""
from __future__ import annotations


class KestrelError(Exception):
    """A file, an argument or a request can't be served.

    The message is one line that names the file, the tensor or key, what was expected and what was found;
    the command line prints it and exits with 2.
    """

    def __init__(self, message: str):
        # A message quotes foreign text (a key, a template's own words): newlines in it must not make two lines.
        super().__init__(" ".join(str(message).split()))
