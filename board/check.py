#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The identity matrix on this machine, with or without a model: python3 board/check.py [MODEL] [--quick | --full] [--json]

The same as `kestrel check`: it uses the installed package, or this source tree when the library has been built in it. Exit code 0 when every cell is equal and
the golden digest is the one checked in, 1 when not, 2 for bad input.
"""
import os
import sys

try:
    import kestrel  # noqa: F401
except ImportError:
    sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from kestrel.cli import main

main(["check", *sys.argv[1:]])
