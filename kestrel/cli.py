# SPDX-License-Identifier: Apache-2.0
"""The command line: text and tables on stdout, progress on stderr; one line and exit code 2 for bad input."""
from __future__ import annotations

import argparse
import os
import signal
import sys
from typing import Any, Dict, List, NoReturn, Optional, Sequence, Tuple

from .bench_command import add_parser as _add_bench
from .errors import KestrelError
from .terminal import note as _note, positive as _positive, print_json as _print_json, progress_bar


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


def _bias(text: str) -> Tuple[int, float]:
    token, _, bias = text.partition("=")
    try:
        return int(token), float(bias)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected ID=BIAS, found {text}") from None


def _convert(args: argparse.Namespace) -> int:
    from .convert import convert

    calibrate = "" if args.calibrate == "off" else _read_file(args.calibrate) if args.calibrate else None
    if calibrate == "" and args.calibrate != "off":
        raise KestrelError(f"{args.calibrate}: expected a text to calibrate with, found nothing")
    convert(args.source, args.destination, args.weights, calibrate, progress_bar("B", "convert"), progress_bar("tok", "calibrate"))
    size = os.path.getsize(args.destination)
    if args.json:
        _print_json({"path": args.destination, "bytes": size, "weights": args.weights})
    else:
        print(f"{args.destination}: {size / 1e6:.1f} MB, {args.weights} weights")
    return 0


def _pull(args: argparse.Namespace) -> int:
    from .pull import pull

    path = pull(args.repo, args.revision, args.file, args.offline, _note)
    if args.json:
        _print_json({"path": path, "repo": args.repo})
    else:
        print(path)
    return 0


def _read_prompt(args: argparse.Namespace) -> str:
    return args.prompt if args.prompt is not None else _read_file(args.prompt_file)


def _read_file(path: Optional[str]) -> str:
    """The text of a file, or of standard input."""
    name = path or "stdin"
    try:
        if path:
            with open(path, "rb") as file:
                raw = file.read()
        elif sys.stdin is None:
            raise KestrelError("stdin: closed")
        else:
            raw = sys.stdin.buffer.read()
        return raw.decode("utf-8")
    except OSError as error:
        raise KestrelError(f"{name}: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise KestrelError(f"{name}: not UTF-8 at byte {error.start}") from None


def _explain(done: Any) -> None:
    """One line for a round."""
    source = f"{done.source}, match {done.match}" if done.source else "no draft"
    print(f"kestrel: {source}: width {done.width}, accepted {done.accepted}, {1e3 * done.cost:.1f} ms, ledger {1e3 * done.ledger:+.1f} ms", file=sys.stderr)


def _coloured(spans: Sequence[Tuple[str, bool]]) -> str:
    """Text with what accepted draft tokens brought in green."""
    return "".join(f"\x1b[32m{text}\x1b[0m" if drafted else text for text, drafted in spans)


def _summary(result: Dict[str, Any]) -> str:
    saved = result["seconds"]["saved"]
    time_saved = f" and {saved:.2f} s" if saved is not None else ""
    return (f"{result['completion_tokens']} tokens in {result['forwards']} forwards, {result['tokens_per_second']:.1f} tokens/s; accepted "
            f"{result['accepted']} of {result['proposed']} drafted, saved {result['forwards_saved']} forwards{time_saved}; "
            f"{result['isa']}, {result['threads']} threads")


def _load(args: argparse.Namespace) -> Any:
    """The model that `generate` and `chat` answer with, with this process kept to the cores that its threads run best on; notes say what is less, or more, than asked for."""
    from .cores import choose_cores, stay_on, warn_of_threads
    from .generate import Model

    cores = choose_cores()
    threads = max(args.threads or cores.threads, args.prefill_threads or 1)
    stay_on(cores.for_threads(threads))
    model = Model.load(args.model, threads=args.threads, prefill_threads=args.prefill_threads, ctx=args.ctx, chunk=args.chunk, kv_type=args.kv, use_mmap=not args.no_mmap)
    if args.threads is not None or args.prefill_threads is not None:
        warn_of_threads(threads, _note, cores)
    if model.ctx < (args.ctx or model.config.max_position_embeddings):
        _note(f"memory has room for a context of {model.ctx}, not the model's {model.config.max_position_embeddings}")
    return model


def _sampling(args: argparse.Namespace) -> Dict[str, Any]:
    """The settings that `_add_sampling` adds the options of."""
    logit_bias = dict(args.logit_bias)
    if len(logit_bias) != len(args.logit_bias):
        raise KestrelError("--logit-bias: a token id is given twice")
    names = ("temperature", "top_k", "top_p", "min_p", "seed", "repetition_penalty", "presence_penalty", "frequency_penalty", "stop")
    return {"logit_bias": logit_bias, **{name: getattr(args, name) for name in names}}


def _generate(args: argparse.Namespace) -> int:
    if args.system is not None and not args.chat:
        raise KestrelError("--system: only with --chat")
    if args.logprobs is not None and not args.json:
        raise KestrelError("--logprobs: only with --json")
    if args.show_drafts and args.json:
        raise KestrelError("--show-drafts: not with --json")
    if args.draft_from == "":
        raise KestrelError("--draft-from: expected a file")
    text = _read_prompt(args)
    draft_from = _read_file(args.draft_from) if args.draft_from is not None else None
    if draft_from == "":
        raise KestrelError(f"{args.draft_from}: expected a text to draft from, found nothing")
    model = _load(args)
    system = [{"role": "system", "content": args.system}] if args.system is not None else []
    prompt: Any = system + [{"role": "user", "content": text}] if args.chat else text
    generation = model.generate(prompt, max_tokens=args.max_tokens, min_tokens=args.min_tokens, draft=args.draft, logprobs=args.logprobs,
                                ignore_end=args.ignore_end, draft_from=draft_from, on_round=_explain if args.explain else None, **_sampling(args))
    colour = args.show_drafts and sys.stdout.isatty()
    for piece in generation:
        if not args.json:
            print(_coloured(generation.spans) if colour else piece, end="", flush=True)
    result = generation.to_json()
    if args.json:
        _print_json(result)
    else:
        print(flush=True)
    if args.explain or (sys.stderr.isatty() and not args.json):
        print(f"kestrel: {_summary(result)}", file=sys.stderr)
    return 0


def _chat(args: argparse.Namespace) -> int:
    from .conversation import Conversation, converse

    model = _load(args)
    conversation = Conversation(model, args.system, max_tokens=args.max_tokens, draft=args.draft, **_sampling(args))
    return converse(conversation, _print_json if args.json else None, _note)


def _info(args: argparse.Namespace) -> int:
    from .info import footprint, info, text
    from .memory import require

    found = info(args.model, args.ctx, args.kv)
    if args.json:
        _print_json(found)
    else:
        print(text(found), flush=True)
    require(footprint(found), found["memory"]["available"], found["path"])
    return 0


def _check(args: argparse.Namespace) -> int:
    from .check import main as run_check

    return run_check(args.model, args.json, args.strength, lambda what: progress_bar("cell", f"check {what}", scale=False), _note)


def _quality(args: argparse.Namespace) -> int:
    from .quality import quality

    text = _read_file(args.text) if args.text else None
    result = quality(args.model, args.reference, text, progress_bar("tok", "quality"), args.kv)
    if args.json:
        _print_json(result)
    else:
        print(f"mean KL {result['mean_kl']:.5f}, p99 {result['p99_kl']:.5f}, argmax agrees {100 * result['argmax_agreement']:.1f} %, "
              f"perplexity {result['perplexity']:.3f} (reference {result['perplexity_reference']:.3f}), {result['positions']} positions")
    return 0


def _add_kv(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--kv", choices=("f16", "f32", "int8"), help="type of the cache (default: f16, f32 for f32 weights)")


def _add_loading(p: argparse.ArgumentParser) -> None:
    p.add_argument("--threads", type=_positive, metavar="N", help="default: the big cores that this process may use")
    p.add_argument("--prefill-threads", type=_positive, metavar="N", help="threads that read the prompt (default: as --threads)")
    p.add_argument("--ctx", type=_positive, metavar="N", help="most positions of prompt and answer (default: the model's, as far as memory goes)")
    p.add_argument("--no-mmap", action="store_true", help="read the file into memory instead of mapping it")
    p.add_argument("--chunk", type=_positive, default=256, metavar="N", help="most prompt tokens a pass (default 256)")
    _add_kv(p)


def _add_sampling(p: argparse.ArgumentParser) -> None:
    p.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0 (default) is greedy")
    p.add_argument("--top-k", type=int, default=0, metavar="N")
    p.add_argument("--top-p", type=float, default=1.0, metavar="P")
    p.add_argument("--min-p", type=float, default=0.0, metavar="P")
    p.add_argument("--seed", type=int, default=0, metavar="S")
    p.add_argument("--repetition-penalty", type=float, default=1.0, metavar="R", help="of tokens in prompt and answer; 1 (default) is off")
    p.add_argument("--presence-penalty", type=float, default=0.0, metavar="A", help="of tokens in the answer")
    p.add_argument("--frequency-penalty", type=float, default=0.0, metavar="A", help="of tokens in the answer, for each time")
    p.add_argument("--logit-bias", type=_bias, action="append", default=[], metavar="ID=BIAS", help="add to a token's logit; may be given again")
    p.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end before this text; may be given again")


def build_parser() -> argparse.ArgumentParser:
    """The parser of `kestrel`; its names are stable."""
    from . import __version__

    parser = _Parser(prog="kestrel", description="Language models on ARM boards, with speculation that never changes a byte.")
    parser.add_argument("--version", action="version", version=f"kestrel {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="command", required=True, parser_class=_Parser)

    p = commands.add_parser("pull", help="fetch a model from the Hugging Face hub; prints what `convert` takes")
    p.add_argument("repo", metavar="OWNER/NAME")
    p.add_argument("--revision", metavar="R", help="branch, tag or commit (default: main)")
    p.add_argument("--file", metavar="NAME.gguf", help="the GGUF file to take, of a repository that holds several")
    p.add_argument("--offline", action="store_true", help="from the cache alone")
    p.add_argument("--json", action="store_true")
    p.set_defaults(run=_pull)

    p = commands.add_parser("convert", help="checkpoint (Hugging Face folder or GGUF) -> one packed file")
    p.add_argument("source")
    p.add_argument("destination")
    p.add_argument("--weights", default="int8", choices=("int8", "int4", "f32"))
    p.add_argument("--calibrate", metavar="FILE|off", help="text for the activation-aware fold of int8 and int4 weights, and int4's rounding (default: a built-in one)")
    p.add_argument("--json", action="store_true")
    p.set_defaults(run=_convert)

    p = commands.add_parser("generate", help="answer a prompt")
    p.add_argument("model")
    source = p.add_mutually_exclusive_group()
    source.add_argument("--prompt", metavar="TEXT")
    source.add_argument("--prompt-file", metavar="FILE", help="default: standard input")
    p.add_argument("--chat", action="store_true", help="the prompt is a user's message: apply the model's chat template")
    p.add_argument("--system", metavar="TEXT", help="system message, with --chat")
    p.add_argument("--max-tokens", type=_positive, default=256, metavar="N")
    p.add_argument("--min-tokens", type=int, default=0, metavar="N", help="nothing ends the answer before so many tokens")
    p.add_argument("--draft", default="auto", metavar="K", help="tokens to guess a round: 0 to 32, off, or auto (default: as many as pay)")
    p.add_argument("--draft-from", metavar="FILE", help="a text that the answer follows with changes, to draft from: the one being edited, say")
    p.add_argument("--explain", action="store_true", help="a line for each round on stderr: source, match, width, accepted, cost, ledger")
    p.add_argument("--show-drafts", action="store_true", help="in a terminal, show in green what accepted drafts brought")
    _add_loading(p)
    _add_sampling(p)
    p.add_argument("--logprobs", type=int, metavar="N", help="with --json: log-probabilities of each token and of the N best (0 to 100)")
    p.add_argument("--ignore-end", action="store_true", help="go on past end tokens (for benchmarks)")
    p.add_argument("--json", action="store_true", help="one JSON object instead of the text")
    p.set_defaults(run=_generate)

    p = commands.add_parser("chat", help="a conversation, in a terminal or one message a line on standard input")
    p.add_argument("model")
    p.add_argument("--system", metavar="TEXT", help="system message")
    p.add_argument("--max-tokens", type=_positive, default=1024, metavar="N", help="of one answer (default 1024)")
    p.add_argument("--draft", default="auto", metavar="K", help="tokens to guess a round: 0 to 32, off, or auto (default: as many as pay)")
    _add_loading(p)
    _add_sampling(p)
    p.add_argument("--json", action="store_true", help="one JSON object an answer, one a line, instead of the text")
    p.set_defaults(run=_chat)

    p = commands.add_parser("info", help="what a packed file is, and what would run it here")
    p.add_argument("model")
    p.add_argument("--ctx", type=_positive, metavar="N", help="positions to say the memory of (default: the model's, or as many as fit)")
    _add_kv(p)
    p.add_argument("--json", action="store_true")
    p.set_defaults(run=_info)

    p = commands.add_parser("check", help="prove on this machine that the answer depends on nothing but model, prompt and settings")
    p.add_argument("model", nargs="?")
    strength = p.add_mutually_exclusive_group()
    strength.add_argument("--quick", dest="strength", action="store_const", const="pairs", help="cells for each pair of settings instead of each triple")
    strength.add_argument("--full", dest="strength", action="store_const", const="product", help="every combination of settings")
    p.add_argument("--json", action="store_true")
    p.set_defaults(run=_check, strength="triples")

    p = commands.add_parser("quality", help="how far a packed model is from a reference one")
    p.add_argument("model")
    p.add_argument("reference", help="the same checkpoint packed with --weights f32")
    p.add_argument("--text", metavar="FILE", help="default: a built-in text")
    _add_kv(p)
    p.add_argument("--json", action="store_true")
    p.set_defaults(run=_quality)

    _add_bench(commands)
    return parser


def _discard_output() -> None:
    """What stdout still holds goes nowhere, so that the interpreter's own flush at the end is silent."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def _refuses_output() -> bool:
    """Whether stdout can't take what it holds (a full disk); then that is discarded."""
    try:
        sys.stdout.flush()
    except OSError:
        _discard_output()
        return True
    return False


_ENDING = (signal.SIGTERM, signal.SIGHUP)


def _end_on(number: int, frame: Any) -> NoReturn:
    """Ends the command by way of its finally blocks, which take away what is half written, with the code a shell gives for the signal."""
    for other in _ENDING:
        signal.signal(other, signal.SIG_IGN)    # a second one would interrupt them
    sys.exit(128 + number)


def main(argv: Optional[List[str]] = None) -> NoReturn:
    """Runs `kestrel` and exits: 0, 1 (a check failed), 2 (bad input, a stream or file that fails), 3 (`bench --strict`: a spoiled row), 128 + a signal's number."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:   # as __main__ left it for the time of the imports
        signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in _ENDING:
        if signal.getsignal(number) is signal.SIG_DFL:      # not under nohup
            signal.signal(number, _end_on)
    if sys.stderr is None:  # closed by the caller: what is said there goes nowhere
        sys.stderr = open(os.devnull, "w")
    try:
        try:
            args = build_parser().parse_args(argv)
            if sys.stdout is None:
                raise KestrelError("stdout: closed")
            sys.stdout.reconfigure(encoding="utf-8")  # type: ignore[union-attr]  # text is UTF-8 whatever the locale
            code = args.run(args)
        finally:  # here, where what fails is still caught: --help exits from within, too
            if sys.stdout is not None:
                sys.stdout.flush()
    except KestrelError as error:
        print(f"kestrel: {error}", file=sys.stderr)
        code = 2
    except MemoryError:
        print("kestrel: out of memory", file=sys.stderr)
        code = 2
    except BrokenPipeError:  # the reader went away
        _discard_output()
        code = 141
    except OSError as error:
        name = "stdout: " if _refuses_output() else f"{error.filename}: " if error.filename else ""
        print(f"kestrel: {KestrelError(f'{name}{error.strerror or error}')}", file=sys.stderr)
        code = 2
    except KeyboardInterrupt:
        print(file=sys.stderr)
        code = 130
    sys.exit(code)
