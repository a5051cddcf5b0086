# SPDX-License-Identifier: Apache-2.0
"""What passes cost: seconds by width and context, as measured while answers are made."""
from __future__ import annotations

from typing import List, Optional

MOST_WIDTH = 33      # the known token and a draft of 32
_RECENT = 5          # passes whose median is the cost of a width
_PLAINS = 16         # plain steps whose mean the ledger goes by
_SAME = 0.05         # a change of a cost that is none (0.02: at 5 % of noise the curve was made anew every second round, 10 us each)
_FORGET = 8          # passes after which the cost of a width that nothing used is doubted: 16 when it was measured once, 256 when five times
_FIRST_SLOPE = 0.15  # of c(1) a row, while no other width is known
_LEAST_SLOPE = 0.03  # of c(1) a row there, at least


def context_bucket(past: int) -> int:
    """Contexts that cost about the same: 0 to 255 positions, then a bucket for each doubling."""
    return max(0, past.bit_length() - 8)


class Context:
    """What passes cost in one context bucket, by width: seconds of the last few, the pass that was the last one, and what follows from them.

    known: seconds, None where nothing is known; curve: every width's. Both None until a plain step was measured here. [0] is no width.
    """

    __slots__ = ("recent", "ratios", "median", "used", "known", "curve", "narrowest", "widest", "until", "plain", "plains")

    def __init__(self) -> None:
        self.recent: List[List[float]] = [[] for _ in range(MOST_WIDTH + 1)]
        self.ratios: List[List[float]] = [[] for _ in range(MOST_WIDTH + 1)]  # to c(1) as it was then: what drifts with it stays
        self.median: List[Optional[float]] = [None] * (MOST_WIDTH + 1)
        self.used = [0] * (MOST_WIDTH + 1)
        self.known: List[Optional[float]] = []
        self.curve: Optional[List[float]] = None
        self.narrowest = 0  # of the known widths beside 1; 0: none
        self.widest = 1
        self.until = 0  # the pass when the curve is made anew whatever came
        self.plain = 0.0  # mean of the last plain steps
        self.plains = 0

    def ratio(self, width: int) -> float:
        """c(w)/c(1), the median of the last passes, each against c(1) of its time; needs a pass of `width` when c(1) was known."""
        ratios = sorted(self.ratios[width])
        return ratios[(len(ratios) - 1) // 2]


class StepCosts:
    """Seconds of a pass by context and width, as measured: the median of the last five. A model has one; requests share it."""

    def __init__(self) -> None:
        self._contexts = [Context() for _ in range(context_bucket(1 << 31) + 1)]
        self._passes = 0
        self._last_plain: Optional[float] = None

    def add(self, width: int, past: int, seconds: float) -> Context:
        """A pass of `width` rows after `past` positions took so long. Returns its context."""
        context = self._contexts[context_bucket(past)]
        recent = context.recent[width]
        recent.append(seconds if seconds > 1e-9 else 1e-9)
        if len(recent) > _RECENT:
            del recent[0]
        known, median = context.median[width], sorted(recent)[(len(recent) - 1) // 2]
        context.median[width] = median
        self._passes += 1
        context.used[width] = self._passes
        plain = context.median[1]
        if width > 1 and plain is not None:
            ratios = context.ratios[width]
            ratios.append(recent[-1] / plain)
            if len(ratios) > _RECENT:
                del ratios[0]
        if width == 1:
            context.plains = min(context.plains + 1, _PLAINS)
            context.plain += (seconds - context.plain) / context.plains
            self._last_plain = context.plain
        curve = context.curve
        if curve is not None:  # made anew only when it changes: this is done after every pass
            if known is None or abs(curve[width] - median) > _SAME * median:
                context.curve = None
            else:
                context.known[width] = median
        return context

    def at(self, past: int) -> Context:
        """What is known of passes after so many positions.

        A width costs what it did relative to c(1) of its time: after a second at half the speed c(2) looked like 2.5 c(1), and the ledger let
        nothing measure it again. One that was not measured in this context costs what it did in a shorter one, so too. Of the others the curve says that
        they lie on the line between their neighbours, beyond the widest on the line from c(1) or from the last but one, the steeper of the
        two. It says so too of a width that was measured long ago, the sooner the fewer times: a bad moment must not last.
        """
        bucket = context_bucket(past)
        context = self._contexts[bucket]
        plain = context.median[1]
        if plain is None or context.curve is not None and self._passes < context.until:
            return context
        context.until = self._passes + 2 * _FORGET
        context.known = known = [plain * context.ratio(width) if context.ratios[width] else seconds for width, seconds in enumerate(context.median)]
        curve = [0.0, plain]
        slope = _FIRST_SLOPE * plain
        context.narrowest, context.widest = 0, 1
        shorter = [lower for lower in reversed(self._contexts[:bucket]) if lower.median[1] is not None]
        for width in range(2, MOST_WIDTH + 1):
            seconds = known[width]
            if seconds is None:
                lower = next((lower for lower in shorter if lower.ratios[width]), None) if shorter else None
                if lower is None:
                    continue
                seconds = known[width] = lower.ratio(width) * plain
            context.narrowest, context.widest = context.narrowest or width, width
            if context.recent[width] and self._passes - context.used[width] > _FORGET << len(context.recent[width]):
                continue
            begin, before = len(curve) - 1, curve[-1]
            step = (seconds - before) / (width - begin)
            curve += [before + step * i for i in range(1, width - begin)]
            curve.append(seconds)
            slope = max(step, (seconds - plain) / (width - 1), _LEAST_SLOPE * plain)
        last = curve[-1]
        curve += [last + slope * i for i in range(1, MOST_WIDTH + 2 - len(curve))]
        context.curve = curve
        return context

    def measured(self, width: int, past: int) -> Optional[float]:
        """Seconds of such a pass; None when none was made in this context."""
        return self._contexts[context_bucket(past)].median[width]

    def plain(self, past: int) -> Optional[float]:
        """Seconds of a plain step, of another context when none was made in this one; None when there was none at all.

        The mean of about the last 16, not a median: what interrupts a speculative step now and then interrupts plain ones as often.
        """
        return self._contexts[context_bucket(past)].plain or self._last_plain

    def curve(self, past: int) -> Optional[List[float]]:
        """Seconds by width, [1] to [MOST_WIDTH], to within 5 %; None until a plain step was measured in this context. See `at`."""
        return self.at(past).curve
