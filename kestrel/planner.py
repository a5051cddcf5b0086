# SPDX-License-Identifier: Apache-2.0
"""Planner: how many tokens to draft in a round, and whether to look for a draft at all, so that speculation never costs what it must not.

A pass of w rows commits at least one token, so it loses at most c(w) - c(1) against a plain step. The ledger
D = time spent in speculative steps and in lookup - tokens they committed x current cost of a plain step
decides: a speculative step only while D + c(w) - c(1) <= B + e * elapsed. So total time is bounded whatever the text, with
e = 0.5 % and B = c(w) - c(1) of the dearest width that this request has used, its lookup included; before that c(1), or c(9) - c(1) where
that is known and less. A width whose cost is not known yet is tried only in a round that began with D <= e * elapsed, and no more than
twice as wide as the widest known: the first tries are narrow and cost next to nothing.
A step that took much longer than its width usually does was interrupted, and so are plain ones now and then, which c(1), a median, doesn't
show: the ledger is charged what is usual, and a second one, with real seconds against the mean of plain steps, ends it at 5 B.
(With real seconds alone a single interruption of 3 c(1) closed the ledger for the rest of an answer: a quarter of the stories.)
Time chooses how much is drafted and never what is committed.
"""
from __future__ import annotations

from typing import Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple

from .costs import Context, StepCosts
from .drafter import Drafter, Proposal, Sources, as_proposal

LOSS = 0.005         # e: the share of its time that a request may lose
_PLAIN_EVERY = 64    # rounds after which a plain step measures its cost again though every round had a draft
_MOST_NOMINAL = 1.0  # times c(1), at most: a cost not seen yet must not loosen the cap
_INTERRUPTED = 1.15  # times the usual cost of its width: a pass that took longer was interrupted, by what interrupts plain steps too
_HICCUPS = 4.0       # times B that interruptions of speculative steps may cost beyond what their widths usually do
_NOMINAL = 9         # B is c(9) - c(1) until a dearer width was used
_SLACK = 0.05        # S, of c(1)
_PAUSE = 8           # rounds after a no of the ledger in which it isn't asked again: asking took 45 us, more than e earns in a step of 7 ms
_RISK = 2.0          # times what a step may lose: its price when the ledger owes B. Less is owed, less is added: of a small rest, the surest drafts first
_FIRST_REACH = 8     # tokens of the longest draft; doubles when all of one that long were right


class Round(NamedTuple):
    """What one pass did. width: rows, 1 + proposed; cost: seconds of the pass; ledger: seconds lost (negative: credit) after it."""

    source: str
    match: int
    width: int
    accepted: int
    cost: float
    ledger: float


class Survival:
    """How likely token i of a draft is right when those before it were, by (source, match length, position), as seen in this request.

    What was not seen is taken from a prior that rises with the match: token i of a draft with match m has a match of m + i when its turn
    comes. Old results fade: acceptance comes in streaks.
    """

    # by match, 17 and more are the last: what greedy answers of SmolLM2-135M to 29 prompts, most of Spec-Bench, showed
    _PRIOR = (0.2, 0.25, 0.5, 0.65, 0.72, 0.8, 0.8, 0.8, 0.8, 0.87, 0.87, 0.87, 0.87, 0.92, 0.92, 0.92, 0.92, 0.96)
    _BUCKET = (0, 1, 2, 3, 4, 4, 5, 5, 5, 5, 6, 6, 6, 6, 6, 6, 6, 7)
    _FIRST = (0, 1, 2, 4, 8, 16)  # positions counted as one begin here
    GROUP = (0, 1, 2, 2) + (3,) * 4 + (4,) * 8 + (5,) * 16
    _WEIGHT = 4.0  # of the prior, in results
    _MOST = 32.0   # results of a group after which all count half

    def __init__(self) -> None:
        self._seen: Dict[Tuple[str, int], Tuple[List[float], List[float]]] = {}  # right, all; by group

    def rates(self, source: str, match: int) -> List[float]:
        """Probabilities by group of positions (GROUP)."""
        prior, last, weight = self._PRIOR, len(self._PRIOR) - 1, self._WEIGHT
        match = min(match, last)
        seen = self._seen.get((source, self._BUCKET[match]))
        if seen is None:
            return [prior[min(match + first, last)] for first in self._FIRST]
        return [(right + weight * prior[min(match + first, last)]) / (tried + weight) for first, right, tried in zip(self._FIRST, *seen)]

    def learn(self, proposal: Proposal, committed: Sequence[int]) -> None:
        """What came after a proposal, whether it was verified or not."""
        key = (proposal.source, self._BUCKET[min(proposal.match, len(self._PRIOR) - 1)])
        seen = self._seen.get(key)
        if seen is None:
            seen = self._seen[key] = ([0.0] * 6, [0.0] * 6)
        right, tried = seen
        for group, guess, token in zip(self.GROUP, proposal, committed):
            if tried[group] >= self._MOST:
                tried[group] /= 2
                right[group] /= 2
            tried[group] += 1
            if guess != token:
                break
            right[group] += 1


class Speculation:
    """One request's drafter, what it cost and what it brought. Plain decoding: the draft is always empty.

    A round is `draft`, the pass, `count`. All seconds come from `clock`.
    """

    def __init__(self, drafter: Drafter, most: int, costs: StepCosts, clock: Callable[[], float]):
        self._drafter, self._most, self._costs, self._clock = drafter, most, costs, clock
        self._proposal = Proposal()
        self._unpriced = 0      # tokens of speculative steps made before the cost of a plain one was known
        self.looked = 0.0       # seconds in `draft` and `count` of the last round
        self.ledger = 0.0
        self._debt = 0.0        # seconds really lost, clamped as the ledger is
        self._balance = 0.0     # without a clamp

    def tell(self, tokens: Sequence[int]) -> None:
        """The tokens of the prompt."""
        self._drafter.extend(tokens)

    def draft(self, most: int, past: int) -> Proposal:
        """The draft for a pass after `past` positions, at most `most` tokens."""
        self.looked = 0.0
        if not self._most:
            return Proposal()
        begin = self._clock()
        most = min(most, self._most)
        self._proposal = as_proposal(self._drafter.propose(most), most) if most > 0 else Proposal()
        self.looked = self._clock() - begin
        self._spend(self.looked)
        return self._proposal

    def count(self, committed: Sequence[int], accepted: int, width: int, past: int, seconds: float, prefill: bool = False) -> Round:
        """The round's pass of `width` rows took `seconds` and committed tokens, `accepted` of them drafted. prefill: it read the prompt too."""
        if self._most:
            begin = self._clock()
            self._drafter.extend(committed)
            told = self._clock() - begin
            self.looked += told
            self._spend(told)
        if not prefill:
            self._settle(len(committed), width, past, seconds)
        return Round(self._proposal.source, self._proposal.match, width, accepted, seconds, self.ledger)

    def _spend(self, seconds: float) -> None:
        self.ledger += seconds
        self._debt += seconds
        self._balance += seconds

    def _settle(self, tokens: int, width: int, past: int, seconds: float) -> None:
        context = self._costs.add(width, past, seconds)
        if width > 1:
            plain = self._costs.plain(past)
            if plain is None:
                self._unpriced += tokens
            lost = seconds - tokens * (plain or 0.0)
            usual = context.median[1]
            if usual is None:
                self.ledger += lost
            else:
                expected = usual * context.ratio(width)
                self.ledger += (seconds if seconds <= _INTERRUPTED * expected else expected) - tokens * usual
            self._debt += lost
            self._balance += lost

    def saved(self, past: int) -> Optional[float]:
        """Seconds that plain steps would have taken for the tokens of the speculative ones, less what these and lookup took.

        None when there were speculative steps only, so that nobody knows what a plain one costs.
        """
        plain = self._costs.plain(past)
        if plain is None and self._unpriced:
            return None
        return self._unpriced * (plain or 0.0) - self._balance


class Planner(Speculation):
    """Drafts of the length that promises most tokens a second, within the ledger.

    What a proposal would have brought is learned from the tokens that came, verified or not, so that being off is never for good; after
    a loss of x seconds the ledger itself waits x / e before the next.
    """

    def __init__(self, drafter: Drafter, most: int, costs: StepCosts, clock: Callable[[], float]):
        super().__init__(drafter, most, costs, clock)
        self._survival = Survival()
        self._untold: List[int] = []  # while the ledger says no, telling the drafter waits too
        self._since_plain = _PLAIN_EVERY  # a request begins with a plain step
        self._pause = 0
        self._reach = _FIRST_REACH
        self._lookups = [0.0] * 3     # seconds of the last ones
        self._widest = 0.0            # largest c(w) - c(1) of a width used
        self.allowance = 0.0          # B
        self.elapsed = 0.0

    def draft(self, most: int, past: int) -> Proposal:
        """See Speculation. Empty when the ledger says no, when no length promises a gain, or when a plain step must be measured."""
        self._proposal = draft = Proposal()
        if self._pause:
            self._pause -= 1
            self.looked = 0.0
            return draft
        begin = self._clock()
        most = min(most, self._reach, self._most)
        if most > 0 and self._since_plain < _PLAIN_EVERY:
            costs = self._costs.at(past)
            if costs.curve is not None:
                free = LOSS * self.elapsed - max(self.ledger, self._debt - _HICCUPS * self.allowance)
                if not costs.narrowest:
                    free += _SLACK * costs.curve[1]
                if self._open(costs, free):
                    if self._untold:
                        self._drafter.extend(self._untold)
                        self._untold = []
                    most = min(most, 2 * costs.widest - 1)
                    found = (self._drafter.proposals(most) if isinstance(self._drafter, Sources)
                             else [p for p in [as_proposal(self._drafter.propose(most), most)] if p])
                    if found:
                        draft = self._choose(found, costs, free, self._clock() - begin)
                    self._lookups = [*self._lookups[1:], self._clock() - begin]
                else:
                    self._pause = _PAUSE
        self._since_plain += 1
        self.looked = self._clock() - begin
        self._spend(self.looked)
        self.elapsed += self.looked
        return draft

    def _open(self, costs: Context, free: float) -> bool:
        """Whether a step could be allowed after a lookup as long as lately: any while nothing is owed, else a known one within B."""
        plain, nominal = costs.known[1], costs.known[_NOMINAL]
        most = _MOST_NOMINAL * plain
        self.allowance = max(self._widest, most if nominal is None else min(nominal - plain, most))
        if free >= 0:
            return True
        width = costs.narrowest
        return width > 0 and costs.known[width] - plain <= self.allowance + free - sorted(self._lookups)[1]

    def _choose(self, found: List[Proposal], costs: Context, free: float, looked: float) -> Proposal:
        """The proposal and length with the most expected tokens a second, of equals the longest match; empty when plain is better.

        The more is owed, the dearer counts what a step may lose (recorded answers, prices with noise: 1.77x -> 1.79x, 1.68x -> 1.72x).
        """
        curve, known, groups = costs.curve, costs.known, self._survival.GROUP
        most = curve[1] + self.allowance + free - looked
        plain = curve[1]
        best, best_length, best_rate = found[0], 0, 1.0 / plain
        risk = _RISK * min(1.0, -free / self.allowance) if free < 0 < self.allowance else 0.0
        first, first_hope = found[0], -1.0
        if len(found) > 1:
            found.sort(key=lambda p: -p.match)
        for proposal in found:
            rates = self._survival.rates(proposal.source, proposal.match)
            alive = expected = 1.0
            for length in range(1, len(proposal) + 1):
                alive *= rates[groups[length - 1]]
                expected += alive
                seconds = curve[length + 1]
                price = seconds + risk * max(0.0, seconds - plain + looked)
                if expected > best_rate * price and (free >= 0 or known[length + 1] is not None and max(seconds, known[length + 1]) <= most):
                    best, best_length, best_rate = proposal, length, expected / price
            if expected > first_hope:
                first, first_hope = proposal, expected
        self._proposal = best if best_length else first  # its tokens are compared with what comes, verified or not
        return Proposal(best[:best_length], best.source, best.match) if best_length else Proposal()

    def count(self, committed: Sequence[int], accepted: int, width: int, past: int, seconds: float, prefill: bool = False) -> Round:
        """See Speculation."""
        if prefill:
            return super().count(committed, accepted, width, past, seconds, prefill)
        self._untold += committed
        self._settle(len(committed), width, past, seconds)
        if width == 1:
            self._since_plain = 0
        else:
            usual = self._costs.measured(1, past)
            if usual is not None:
                self._widest = max(self._widest, (self._costs.measured(width, past) or 0.0) - usual)
            self.allowance = max(self.allowance, self._widest)
            self.ledger = max(self.ledger, -self.allowance)
            self._debt = max(self._debt, -self.allowance)
            if accepted >= self._reach:
                self._reach *= 2
        self.elapsed += seconds
        if self._proposal:
            begin = self._clock()
            self._survival.learn(self._proposal, committed)
            spent = self._clock() - begin
            self.looked += spent
            self._spend(spent)
            self.elapsed += spent
        return Round(self._proposal.source, self._proposal.match, width, accepted, seconds, self.ledger)
