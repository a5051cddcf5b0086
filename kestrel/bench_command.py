# SPDX-License-Identifier: Apache-2.0
"""`kestrel bench`: options, what belongs together, where the rows go. Exit code 1: an answer differed; 3: `--strict` and a spoiled row."""
from __future__ import annotations

import argparse
import os
import sys
from typing import Any, Dict, List

from .destination import new_file
from .errors import KestrelError
from .terminal import note, positive, print_json, progress_bar


def _synthetic(args: argparse.Namespace) -> str:
    from .synthetic import cached_synthetic

    return cached_synthetic(args.synthetic, args.weights or "int8", progress=progress_bar("B", f"make {args.synthetic}"))


def run(args: argparse.Namespace) -> int:
    """`kestrel bench`: the exit code."""
    if args.compare is not None:
        return _compare(args)
    if (args.model is None) == (args.synthetic is None):
        raise KestrelError("bench: expected a model or --synthetic SHAPE, and not both")
    if args.weights and args.model is not None:
        raise KestrelError("--weights: only with --synthetic")
    for name in ("depths", "widths", "prefill", "decode", "buffer", "html", "strict", "brief") if args.speculation else ("workloads", "tokens", "every", "svg"):
        if getattr(args, name) is not None:
            raise KestrelError(f"--{name}: {'not' if args.speculation else 'only'} with --speculation")
    if args.speculation:
        return _boundary(args)
    from .bench import Plan
    from .device import measure
    from .report import markdown, page, spoiled

    if args.html is not None:
        _check_target(args.html)
    model = args.model or _synthetic(args)
    given = {name: getattr(args, name) for name in ("threads", "depths", "widths", "samples", "prefill", "decode")}
    plan = Plan(**{name: value for name, value in given.items() if value is not None})
    if args.buffer is not None:
        plan = plan._replace(buffer=args.buffer << 20)
    rows: List[Dict[str, Any]] = []
    for row in measure(model, plan, args.kv_type, bool(args.brief), args.synthetic is None, progress_bar("round", "bench", scale=False), note):
        rows.append(row)
        if args.json:
            print_json(row)
            sys.stdout.flush()
    if not args.json:
        print(markdown(rows))
    if args.html is not None:
        with new_file(args.html) as file:
            file.write(page(rows).encode())
    bad = spoiled(rows)
    if bad:
        note(f"{len(bad)} of {sum('marks' in row for row in rows)} rows were spoiled by throttling or swapping")
    if not all(row["identical"] for row in rows if row["kind"] == "speculation"):
        return 1
    return 3 if args.strict and bad else 0


def _compare(args: argparse.Namespace) -> int:
    from .report import compare, comparison, read_rows

    if args.model is not None or args.synthetic is not None or args.speculation:
        raise KestrelError("--compare: expected two files and nothing to measure")
    found = compare(*(read_rows(path) for path in args.compare))
    if not found:
        raise KestrelError(f"--compare: {args.compare[0]} and {args.compare[1]} have no measurement in common")
    if args.json:
        for row in found:
            print_json(row)
    else:
        print(comparison(found))
    return 0


def _check_target(path: str) -> None:
    """KestrelError unless a file can be written there: said before minutes of measuring."""
    folder = os.path.dirname(path) or "."
    if os.path.isdir(path) or not os.path.isdir(folder) or not os.access(folder, os.W_OK):
        raise KestrelError(f"{path}: expected a file in a folder that can be written to")


def _boundary(args: argparse.Namespace) -> int:
    from .boundary import boundary, check_picture, draw_picture, markdown
    from .workloads import builtin_workloads, every, read_workloads

    if args.threads is not None and len(args.threads) > 1:
        raise KestrelError(f"--threads: expected one number with --speculation, found {len(args.threads)}")
    if args.svg is not None:
        check_picture(args.svg)
    workloads = every(read_workloads(args.workloads) if args.workloads is not None else builtin_workloads(), args.every or 1)
    model = args.model or _synthetic(args)
    results: List[Dict[str, Any]] = []
    for row in boundary(model, workloads, args.tokens or 256, args.samples or (3 if args.workloads is None else 1), args.threads[0] if args.threads else None,
                        args.kv_type, progress_bar("run", "speculation", scale=False), note):
        results.append(row)
        if args.json:  # each as soon as it is known: the whole takes long
            print_json(row)
            sys.stdout.flush()
    if not args.json:
        print(markdown(results))
    if args.svg is not None:
        draw_picture(results, args.svg)
    return 0 if all(row["identical"] for row in results) else 1


def add_parser(commands: Any) -> None:
    """The parser of `kestrel bench`."""
    p = commands.add_parser("bench", help="read bandwidth, prefill, decode and the cost of a verify pass on this machine")
    p.add_argument("model", nargs="?")
    p.add_argument("--synthetic", metavar="SHAPE", help="instead of a model one made from a seed, kept in $KESTREL_CACHE: 135m, 0.5b, 1.5b, "
                                                        "or LAYERSxHIDDENxMLPxHEADSxKV_HEADSxHEAD_DIMxVOCAB")
    p.add_argument("--weights", choices=("int8", "int4", "f32"), help="with --synthetic, type of its weights (default: int8)")
    p.add_argument("--threads", type=positive, nargs="+", metavar="N", help="thread counts (default: the big cores that this process may use, and what a probe finds fastest)")
    p.add_argument("--depths", type=int, nargs="+", metavar="N", help="positions in the cache before (default: 0 512 2048)")
    p.add_argument("--widths", type=positive, nargs="+", metavar="N", help="rows of a verify pass (default: 1 2 3 4 5 8 16)")
    p.add_argument("--samples", type=positive, metavar="N", help="rounds (default: 5; with --speculation 3, with --workloads 1)")
    p.add_argument("--prefill", type=positive, metavar="N", help="tokens of a prefill (default: 512)")
    p.add_argument("--decode", type=positive, metavar="N", help="tokens of a decoding run (default: 32)")
    p.add_argument("--buffer", type=positive, metavar="MIB", help="size of the bandwidth probe's own buffer (default: 256)")
    p.add_argument("--kv", "--kv-type", dest="kv_type", metavar="TYPE", help="type of the cache: f16, f32 or int8 (default: the model's)")
    p.add_argument("--speculation", action="store_true", help="instead, where speculation pays: draft off, auto and fixed on eight kinds of text")
    p.add_argument("--workloads", metavar="DIR", help="with --speculation, other prompts: *.jsonl in Spec-Bench's form (category, turns), or one such file")
    p.add_argument("--tokens", type=positive, metavar="N", help="with --speculation, most tokens of an answer (default: 256)")
    p.add_argument("--every", type=positive, metavar="N", help="with --speculation, every N-th prompt of each kind (default: 1, all)")
    p.add_argument("--brief", action="store_true", default=None, help="without cold start, choice of threads and speculation")
    p.add_argument("--html", metavar="FILE", help="write the report as one page with pictures too")
    p.add_argument("--strict", action="store_true", default=None, help="exit with 3 when throttling or swapping spoiled a row")
    p.add_argument("--compare", nargs=2, metavar=("A", "B"), help="instead, two runs' JSON lines side by side: ratios, and which are beyond noise")
    p.add_argument("--svg", metavar="FILE", help="with --speculation, a picture of it (needs matplotlib)")
    p.add_argument("--json", action="store_true", help="one JSON object a measurement, one a line")
    p.set_defaults(run=run)
