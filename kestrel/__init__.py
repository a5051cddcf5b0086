# SPDX-License-Identifier: Apache-2.0
"""kestrel: language models on ARM boards, with speculative decoding whose output is the same to the last bit.

    from kestrel import Model
    for piece in Model.load("model.kestrel").generate("Hello", max_tokens=64):
        print(piece, end="")
"""
from typing import Any

from .errors import KestrelError

__version__ = "0.1.0"
__all__ = ["KestrelError", "Model"]


def __getattr__(name: str) -> Any:  # the model's imports only when it is asked for
    if name == "Model":
        from .generate import Model

        return Model
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
