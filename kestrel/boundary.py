# SPDX-License-Identifier: Apache-2.0
"""The boundary report: where speculation pays and where it doesn't, by kind of text, with the byte-identity verdict beside each speed.

Every prompt is answered plainly, with draft auto and with fixed lengths, all modes in turn, so that a change of clock or load meets all
alike. A mode's speed comes from pairs: its answer's seconds a token against those of the plain answer of the same turn; the median over
turns, then all answers of a workload together. Decode phase only: what follows the round that read the prompt.
"""
from __future__ import annotations

import hashlib
import os
from statistics import median
from typing import Any, Callable, Dict, Iterator, List, Optional, Sequence, Tuple

from .costs import StepCosts
from .destination import new_file, resolved
from .drafter import Drafter, Proposal
from .errors import KestrelError
from .generate import DraftFrom, Model
from .model import MAX_DRAFT
from .planner import Planner, Round, Speculation
from .workloads import Workload, builtin_workloads

LENGTHS = (2, 4, 8)  # fixed drafts that auto is compared with
WIDE = 15            # one more for the drafter that is always right: a pass of 16 rows
WINDOW = 64          # tokens of the worst stretch, and of a degenerate loop
PERIOD = 16          # tokens that a degenerate loop repeats, at most
_TRUSTED = 64        # the match that a scripted drafter claims
_WARM = 32           # tokens of the answers that warm up


class Scripted:
    """A drafter that knows the plain answer: it proposes what comes, or (wrong) the id after each of these, never the token that comes."""

    def __init__(self, answer: Sequence[int], prompt_tokens: int, wrong: bool, vocabulary: int):
        self._guesses = [(token + 1) % vocabulary for token in answer] if wrong else list(answer)
        self._source = "wrong" if wrong else "right"
        self._at = -prompt_tokens

    def extend(self, tokens: Sequence[int]) -> None:
        """See Drafter."""
        self._at += len(tokens)

    def propose(self, most: int) -> Proposal:
        """See Drafter."""
        return Proposal(self._guesses[self._at:self._at + most], self._source, _TRUSTED)


class _Model(Model):
    """A scripted drafter stands alone with draft auto too: the session's own lookup would mend what a wrong one breaks."""

    def _speculation(self, draft: Any, draft_from: Optional[DraftFrom], prompt_tokens: int) -> Speculation:
        if isinstance(draft_from, Scripted) and draft == "auto":
            return Planner(draft_from, MAX_DRAFT, self.costs, self.clock)
        return super()._speculation(draft, draft_from, prompt_tokens)


class _Answer:
    """One run of one prompt: its bytes, and when they came. marks: (tokens so far, the clock) after each round."""

    def __init__(self, model: Model, prompt: Any, draft: Any, drafter: Optional[Drafter], most: int):
        self.marks: List[Tuple[int, float]] = []
        self.rounds: List[Round] = []
        lookups: List[float] = []

        def on_round(done: Round) -> None:
            self.rounds.append(done)
            self.marks.append((len(generation.token_ids), model.clock()))
            lookups.append(generation.statistics.draft)

        generation = model.generate(prompt, max_tokens=most, draft=draft, draft_from=drafter, on_round=on_round)
        generation.run()
        self.prompt_tokens = len(generation.prompt_ids)
        self.ids, self.text, self.finish_reason = generation.token_ids, generation.text, generation.finish_reason
        del self.rounds[0]  # it read the prompt
        self.tokens = len(self.ids) - self.marks[0][0]
        self.seconds = self.marks[-1][1] - self.marks[0][1]
        self.lookup = lookups[-1] - lookups[0]

    @property
    def same(self) -> Tuple[Any, ...]:
        """What must not depend on the draft."""
        return self.ids, self.text, self.finish_reason

    @property
    def pace(self) -> Optional[float]:
        """Seconds a token; None when the first round was the only one."""
        return self.seconds / self.tokens if self.tokens and self.seconds > 0 else None


# of one prompt: the answers of each mode, one a turn
_Slot = Dict[str, List[_Answer]]


def in_loop(ids: Sequence[int]) -> bool:
    """Whether 64 tokens on end repeat themselves with a period of at most 16: such a text inflates acceptance."""
    for period in range(1, PERIOD + 1):
        run = 0
        for now, before in zip(ids[period:], ids):
            run = run + 1 if now == before else 0
            if run >= WINDOW - period:
                return True
    return False


def worst_window(plain: Sequence[Tuple[int, float]], marks: Sequence[Tuple[int, float]]) -> Optional[float]:
    """The least ratio of plain seconds to seconds over a stretch of at least 64 tokens, from round to round; None for a shorter answer.

    Both as (tokens so far, clock) after each round, of the same answer; the plain one has a mark for each token.
    """
    clock = dict(plain)
    ratios = []
    end = 0
    for tokens, begin in marks:
        while end < len(marks) and marks[end][0] - tokens < WINDOW:
            end += 1
        if end == len(marks):
            break
        if marks[end][1] > begin:
            ratios.append((clock[marks[end][0]] - clock[tokens]) / (marks[end][1] - begin))
    return min(ratios, default=None)


def _identical(slot: _Slot) -> bool:
    first = slot["off"][0].same
    return all(answer.same == first for answers in slot.values() for answer in answers)


def _digest(slots: Sequence[_Slot]) -> str:
    """SHA-256 of all plain answers' ids, four bytes each, little-endian."""
    return hashlib.sha256(b"".join(i.to_bytes(4, "little") for slot in slots for i in slot["off"][0].ids)).hexdigest()


def _speeds(slots: Sequence[_Slot], mode: str) -> Tuple[Optional[float], Optional[float]]:
    """Tokens a second, plain and of a mode, of all prompts together; None, None when no answer has a second token."""
    tokens, plain, seconds = 0, 0.0, 0.0
    for slot in slots:
        pairs = [(off.pace, on.pace) for off, on in zip(slot["off"], slot.get(mode, ()))]
        known = [(off, on) for off, on in pairs if off and on]
        if not known:
            continue
        count = len(slot["off"][0].ids) - 1
        pace = median(off for off, _ in known)
        tokens += count
        plain += count * pace
        seconds += count * pace / median(off / on for off, on in known)
    return (tokens / plain, tokens / seconds) if tokens else (None, None)


def _per_forward(slots: Sequence[_Slot], mode: str) -> Optional[float]:
    answers = [answer for slot in slots for answer in slot.get(mode, ())]
    forwards = sum(len(a.rounds) for a in answers)
    return sum(a.tokens for a in answers) / forwards if forwards else None


def _ratio(pair: Tuple[Optional[float], Optional[float]]) -> Optional[float]:
    return pair[1] / pair[0] if pair[0] and pair[1] else None


def _worst(slots: Sequence[_Slot]) -> Optional[float]:
    """Of all prompts the worst window, which of one prompt is the median over its turns."""
    found = []
    for slot in slots:
        if _identical(slot):
            windows = [worst_window(off.marks, on.marks) for off, on in zip(slot["off"], slot["auto"])]
            known = [w for w in windows if w is not None]
            if known:
                found.append(median(known))
    return min(found, default=None)


def _row(name: str, slots: Sequence[_Slot], lengths: Sequence[int]) -> Dict[str, Any]:
    """The report's line for one workload."""
    speeds = _speeds(slots, "auto")
    autos = [answer for slot in slots for answer in slot["auto"]]
    histogram = [0] * (1 + max((r.accepted for a in autos for r in a.rounds), default=0))
    costs: Dict[int, List[float]] = {}
    for answer in (a for slot in slots for answers in slot.values() for a in answers):
        for done in answer.rounds:
            costs.setdefault(done.width, []).append(done.cost)
    for answer in autos:
        for done in answer.rounds:
            histogram[done.accepted] += 1
    fixed = {}
    for k in lengths:
        pair = _speeds(slots, str(k))
        fixed[str(k)] = {"tokens_per_second": pair[1], "ratio": _ratio(pair), "tokens_per_forward": _per_forward(slots, str(k))}
    best = max(fixed, key=lambda k: fixed[k]["ratio"] or 0.0)
    seconds = sum(a.seconds for a in autos)
    loops = [in_loop(slot["off"][0].ids) for slot in slots]
    plain_cost = median(costs[1]) if costs.get(1) else None
    ratio, per_forward = _ratio(speeds), _per_forward(slots, "auto")
    return {
        "kind": "speculation", "workload": name, "draft": "auto", "off": speeds[0], "on": speeds[1], "ratio": ratio,
        "tokens_per_forward": per_forward, "efficiency": ratio / per_forward if ratio and per_forward else None,
        "accepted_histogram": histogram, "identical": all(map(_identical, slots)), "sha256": _digest(slots),
        "fixed": fixed, "best_fixed": best, "lookup_share": sum(a.lookup for a in autos) / seconds if seconds > 0 else None,
        "worst_window": _worst(slots), "answers": len(slots), "tokens": sum(len(slot["off"][0].ids) for slot in slots),
        "forwards": sum(len(a.rounds) for a in autos), "proposed": sum(r.width - 1 for a in autos for r in a.rounds),
        "accepted": sum(r.accepted for a in autos for r in a.rounds), "loops": sum(loops),
        "ratio_without_loops": _ratio(_speeds([slot for slot, loop in zip(slots, loops) if not loop], "auto")),
        "costs": {str(w): median(costs[w]) / plain_cost for w in sorted(costs) if len(costs[w]) > 2} if plain_cost else {},
        "prompts": [{"prompt_tokens": slot["off"][0].prompt_tokens, "tokens": len(slot["off"][0].ids), "finish_reason": slot["off"][0].finish_reason,
                     "ratio": _ratio(_speeds([slot], "auto")), "tokens_per_forward": _per_forward([slot], "auto"), "worst_window": _worst([slot]),
                     "loop": loop, "identical": _identical(slot)} for slot, loop in zip(slots, loops)],
    }


class _Dialogues:
    """Runs dialogues in any mode. Each mode keeps its own measured costs: what one has learned of widths must not help another."""

    def __init__(self, model: Model, most: int):
        self.model, self._most = model, most
        self._costs: Dict[str, StepCosts] = {}

    def _prompt(self, messages: Sequence[Dict[str, str]]) -> Any:
        return list(messages) if self.model.chat_template is not None else "\n\n".join(m["content"] for m in messages) + "\n\n"

    def fits(self, dialogue: Sequence[str]) -> bool:
        """Whether the first turn leaves room for two tokens."""
        return len(self.model.encode(self._prompt([{"role": "user", "content": dialogue[0]}]))) + 2 <= self.model.ctx

    def run(self, dialogue: Sequence[str], mode: str, drafter: Optional[str] = None, plain: Sequence[_Answer] = ()) -> List[_Answer]:
        """An answer for each turn, fewer when the context is full. plain: the answers that a scripted drafter goes by."""
        model = self.model
        model.costs = self._costs.setdefault(mode, StepCosts())
        messages: List[Dict[str, str]] = []
        answers: List[_Answer] = []
        for i, turn in enumerate(dialogue):
            messages.append({"role": "user", "content": turn})
            prompt = model.encode(self._prompt(messages))
            if len(prompt) + 2 > model.ctx:
                break
            scripted = None
            if drafter is not None and mode != "off" and i < len(plain):
                scripted = Scripted(plain[i].ids, len(prompt), drafter == "wrong", model.sampled_vocab)
            answers.append(_Answer(model, prompt, mode, scripted, self._most))
            messages.append({"role": "assistant", "content": answers[-1].text})
        return answers


def boundary(path: Any, workloads: Optional[Sequence[Workload]] = None, tokens: int = 256, samples: int = 3, threads: Optional[int] = None,
             kv_type: Optional[str] = None, progress: Callable[[int, int], None] = lambda done, total: None,
             note: Callable[[str], None] = lambda text: None) -> Iterator[Dict[str, Any]]:
    """Yields one dictionary a workload (default: the built-in ones), of kind "speculation", then one for all texts together ("overall").

    off, on: tokens a second, plain and with draft auto; ratio: on / off; tokens_per_forward, accepted_histogram, forwards, proposed and
    accepted: of all turns of auto, decode phase; efficiency: ratio / tokens_per_forward; fixed: by draft length; best_fixed: the fastest of
    them; lookup_share: of auto's seconds; worst_window: see `worst_window`; loops: answers that are degenerate loops; costs: c(w)/c(1) by
    width as seen; sha256: of the plain answers' ids; identical: whether ids, text and finish reason are the same in all modes and turns; prompts: one entry an answer.
    Speeds are None where no answer has a second token. tokens: most of an answer; samples: turns. KestrelError: bad input.
    """
    for name, value in (("tokens", tokens), ("samples", samples)):
        if not 1 <= value <= 1 << 20:
            raise KestrelError(f"{name}: expected 1 to {1 << 20}, found {value}")
    workloads = builtin_workloads() if workloads is None else workloads
    model = _Model.load(path, threads=threads, kv_type=kv_type)
    dialogues = _Dialogues(model, tokens)
    kept = []
    for work in workloads:
        fitting = [d for d in work.dialogues if dialogues.fits(d)]
        if len(fitting) < len(work.dialogues):
            note(f"{work.name}: {len(work.dialogues) - len(fitting)} of {len(work.dialogues)} prompts left out: no room in the context of {model.ctx}")
        if fitting:
            kept.append(work._replace(dialogues=fitting))
    if not kept:
        raise KestrelError(f"workloads: no prompt fits in a context of {model.ctx}")
    warm = _Dialogues(model, _WARM)
    for mode in ("off", "auto", *map(str, LENGTHS)):
        warm.run(("Once upon a time",), mode)

    def modes(work: Workload) -> List[str]:
        return ["off", "auto", *map(str, LENGTHS), *([str(WIDE)] if work.drafter == "right" else [])]

    total, done = sum(len(w.dialogues) * len(modes(w)) * samples for w in kept), 0
    texts: List[_Slot] = []
    about = {"model": os.path.basename(model.packed.path), "source": model.packed.source, "weights": model.packed.weight_type,
             "kv_type": model.kv_type, "isa": model.isa, "threads": model.threads, "samples": samples, "max_tokens": tokens}
    progress(0, total)
    for work in kept:
        slots: List[_Slot] = []
        for dialogue in work.dialogues:
            plain = dialogues.run(dialogue, "off") if work.drafter else []
            own: List[_Slot] = [{} for _ in dialogue]
            for turn in range(samples):
                order = modes(work)
                shift = (turn + len(slots)) % len(order)  # another mode comes first each time
                for mode in order[shift:] + order[:shift]:
                    for slot, answer in zip(own, dialogues.run(dialogue, mode, work.drafter, plain)):
                        slot.setdefault(mode, []).append(answer)
                    done += 1
                    progress(done, total)
            slots += [slot for slot in own if "off" in slot and "auto" in slot]
        lengths = LENGTHS if work.drafter != "right" else (*LENGTHS, WIDE)
        yield {**_row(work.name, slots, lengths), **about, "drafter": work.drafter}
        texts += slots if work.drafter is None else []
    if sum(work.drafter is None for work in kept) > 1:
        overall = _row("overall", texts, LENGTHS)
        del overall["prompts"]
        yield {**overall, **about, "drafter": None}


def markdown(results: Sequence[Dict[str, Any]]) -> str:
    """The report for people."""
    def shown(value: Optional[float], form: str = ".2f") -> str:
        return "-" if value is None else format(value, form)

    def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> List[str]:
        return ["| " + " | ".join(cells) + " |" for cells in (head, ["---"] + ["---:"] * (len(head) - 1), *rows)] + [""]

    first = results[0]
    lines = [f"{first['model']}: {first['weights']} weights, {first['kv_type']} cache, {first['isa']}, {first['threads']} threads; answers of at most "
             f"{first['max_tokens']} tokens, {first['samples']} turns; decode phase, tokens/s; ratios to draft off", ""]
    lines += table(
        ["workload", "tokens", "off", "auto", "ratio", "tokens/forward", "ratio of that", "best fixed", "its ratio", "its tokens/forward", "lookup",
         f"worst {WINDOW}", "loops", "identical"],
        [[r["workload"], str(r["tokens"]), shown(r["off"], ".1f"), shown(r["on"], ".1f"), shown(r["ratio"], ".3f"), shown(r["tokens_per_forward"]),
          shown(r["efficiency"]), r["best_fixed"], shown(r["fixed"][r["best_fixed"]]["ratio"], ".3f"),
          shown(r["fixed"][r["best_fixed"]]["tokens_per_forward"]), shown(r["lookup_share"], ".2%"), shown(r["worst_window"], ".3f"),
          f"{r['loops']} of {r['answers']}" + (f" (without: {shown(r['ratio_without_loops'])})" if r["loops"] else ""),
          "yes" if r["identical"] else "NO"] for r in results])
    lines += table(["workload", "rounds by accepted (auto)", "c(w)/c(1)"],
                   [[r["workload"], " ".join(f"{n}:{count}" for n, count in enumerate(r["accepted_histogram"]) if count) or "-",
                     " ".join(f"{w}:{c:.2f}" for w, c in r["costs"].items() if w != "1") or "-"] for r in results])
    return "\n".join(lines[:-1])


def check_picture(path: str) -> None:
    """KestrelError unless `draw_picture` could write there: asked before an hour of measuring."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise KestrelError("--svg: expected matplotlib, found none: pip install 'kestrel[plot]'") from None
    if not os.access(os.path.dirname(resolved(path)), os.W_OK):
        raise KestrelError(f"{path}: expected a file in a folder that can be written to")


def draw_picture(results: Sequence[Dict[str, Any]], path: str) -> None:
    """Writes an SVG: ratio over tokens per forward, a mark for each workload, with y = 1 and the aim y = 0.92 x. KestrelError: see above."""
    check_picture(path)
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    with matplotlib.rc_context({"svg.hashsalt": "kestrel", "svg.fonttype": "none"}):
        figure = Figure(figsize=(9, 6))
        figure.subplots_adjust(left=0.08, right=0.74, bottom=0.09, top=0.93)
        FigureCanvasSVG(figure)
        axes = figure.add_subplot()
        points = [r for r in results if r["ratio"] is not None and r["tokens_per_forward"] is not None]
        right = 1.15 * max([2.0] + [r["tokens_per_forward"] for r in points])
        axes.plot([0.9, right], [0.92 * 0.9, 0.92 * right], linestyle="--", color="0.4", label="0.92 x tokens per forward")
        axes.axhline(1.0, color="0.4", label="as fast as without")
        for r in points:
            axes.plot([r["tokens_per_forward"]], [r["ratio"]], marker="s" if r["drafter"] else "D" if r["workload"] == "overall" else "o",
                      color="tab:red" if r["ratio"] < 0.99 else "tab:blue", gid="workload-" + r["workload"].replace(" ", "-"))
        if right > 4:
            axes.set_xscale("log", base=2)
            axes.set_yscale("log", base=2)
            for axis in (axes.xaxis, axes.yaxis):
                axis.set_major_formatter("{x:g}")
        axes.autoscale(False)
        # names in a column beside the picture, as high as their marks where there is room: marks of like texts lie close together
        points.sort(key=lambda r: r["ratio"])
        marks = [(r["tokens_per_forward"], r["ratio"]) for r in points]
        heights: List[float] = []
        for mark in marks:
            heights.append(max(heights[-1] + 0.05 if heights else 0.0, axes.transAxes.inverted().transform(axes.transData.transform(mark))[1]))
        top = 1.0
        for i in reversed(range(len(points))):
            heights[i] = min(heights[i], top)
            top = heights[i] - 0.05
        for r, mark, height in zip(points, marks, heights):
            axes.annotate(f"{r['workload']}{' (loops)' if r['loops'] else ''} {r['ratio']:.2f}", mark, xytext=(1.02, height), textcoords="axes fraction",
                          fontsize=8, verticalalignment="center", annotation_clip=False,
                          arrowprops={"arrowstyle": "-", "linewidth": 0.4, "color": "0.6", "shrinkA": 1, "shrinkB": 4})
        axes.set_xlabel("tokens per forward")
        axes.set_ylabel("speed with draft auto / off")
        axes.set_title(f"{results[0]['model']}, {results[0]['isa']}, {results[0]['threads']} threads")
        axes.legend(loc="upper left")
        with new_file(path) as file:
            figure.savefig(file, format="svg", metadata={"Date": None, "Creator": "kestrel"})
