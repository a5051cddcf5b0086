# SPDX-License-Identifier: Apache-2.0
"""python -m kestrel"""
from .cli import main

main()
