"""Decides, step by step, which tokens of which sequences run: plain Python, no JAX.

First come, first served within a priority. All running decodes go into every step; what is left of
its budget goes to prompts, in chunks. When pages run out, the sequence that ranks last gives up its
own and is recomputed later.
"""

from __future__ import annotations

import bisect
import dataclasses

from .pages import Node, Pages, pages_for
from .sequences import NO_SLOT, Plan, Rows, Sequence


@dataclasses.dataclass
class _Chosen:
    """A plan in the making."""

    budget: int
    rows: list[Rows] = dataclasses.field(default_factory=list)
    score: Rows | None = None

    def add(self, rows: Rows | None, *, paid: bool = False) -> None:
        """Takes what a sequence runs, off the budget if it was not `paid` for before."""
        if rows is not None:
            self.rows.append(rows)
            self.budget -= 0 if paid else rows.count


class Scheduler:
    """Plans steps over the sequences that were added.

    Args:
      pages: of the cache; at least as many as one sequence of the longest kind takes.
      slots: sequences that may run at once (S).
      step_tokens: most tokens that one step runs; more than `slots`, or prompts would never go on.
      score_tokens: most tokens that one score step runs.
      repeat: decode steps to plan at once while nothing waits.
      mixed: let prompts and decodes share a step; if not, they take turns.
    """

    def __init__(
        self,
        pages: Pages,
        *,
        slots: int,
        step_tokens: int,
        score_tokens: int,
        repeat: int = 1,
        mixed: bool = True,
    ) -> None:
        self.pages = pages
        self.step = 0
        self.preemptions = 0
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self._free_slots = list(range(slots - 1, -1, -1))
        self._step_tokens = step_tokens
        self._score_tokens = score_tokens
        self._repeat = repeat
        self._mixed = mixed
        self._prompts_turn = True

    def add(self, sequence: Sequence) -> None:
        """Puts a sequence into the queue."""
        bisect.insort(self.waiting, sequence, key=_rank)

    def finish(self, sequence: Sequence) -> None:
        """Ends a sequence, wherever it is, and gives back what it held."""
        sequence.done = True
        if sequence.slot == NO_SLOT:
            self.waiting.remove(sequence)
        else:
            self._vacate(sequence)

    def accept(self, sequence: Sequence, token: int) -> None:
        """Takes note of a token that a planned step sampled."""
        sequence.pending -= 1
        sequence.failures = 0
        sequence.tokens.append(token)
        self._publish(sequence)

    def forget(self, sequence: Sequence) -> None:
        """Takes the sequence's pages out of the prefix tree: they are not fit for use."""
        # It may have lost them since: what it filled is found by its tokens.
        root = self.pages.root(sequence.namespace)
        first = self.pages.following(root, sequence.tokens, 0)
        if first is not None:
            self.pages.withdraw(first)

    def restart(self) -> None:
        """Forgets what the cache holds: everything that was running goes back into the queue."""
        for sequence in list(self.running):
            self._vacate(sequence)
            self.add(sequence)
        for sequence in self.waiting:
            sequence.pending = 0
        self.pages.clear()

    @property
    def free_slots(self) -> int:
        """Slots that no sequence has."""
        return len(self._free_slots)

    @property
    def load(self) -> int:
        """Tokens that sequences hold or wait to run."""
        return sum(sequence.length for sequence in (*self.running, *self.waiting))

    @property
    def steady(self) -> bool:
        """Nothing waits and no prompt is being read: decode steps may go on by themselves."""
        return not self.waiting and not any(s.left > 1 for s in self.running)

    def count_known(self, sequence: Sequence) -> int:
        """Pages of a waiting sequence that the prefix tree has."""
        return len(self._matches(sequence)[0])

    def plan(self, *, steady: bool = True) -> Plan | None:
        """The next step, or None if no sequence has anything to run.

        What it plans counts as done from here on: pages are taken, `computed` and `pending` rise.
        Several decode steps are planned at once only where the caller, too, finds things `steady`.
        """
        self.step += 1
        if self._mixed:
            return self._plan(decodes=True, prompts=True, steady=steady)
        self._prompts_turn = turn = not self._prompts_turn
        planned = self._plan(decodes=not turn, prompts=turn, steady=steady)
        return planned or self._plan(decodes=turn, prompts=not turn, steady=steady)

    def _plan(self, *, decodes: bool, prompts: bool, steady: bool) -> Plan | None:
        chosen = _Chosen(self._step_tokens)
        repeat = 1
        if decodes:
            # They go first, whatever their rank.
            chosen.budget -= sum(s.left == 1 and not s.scoring for s in self.running)
            if steady and self.steady:
                repeat = self._repeat
        for sequence in list(self.running):
            if sequence.slot == NO_SLOT:  # preempted by one before it
                continue
            if sequence.left == 1 and not sequence.scoring:
                if decodes:
                    chosen.add(self._decode(sequence, repeat), paid=True)
            elif prompts:
                self._go_on(sequence, chosen, fresh=False)
        admitted = self._admit_waiting(chosen) if prompts else []
        if not chosen.rows and chosen.score is None:
            return None
        return Plan(self.step, tuple(admitted), tuple(chosen.rows), chosen.score, repeat)

    def _go_on(self, sequence: Sequence, chosen: _Chosen, *, fresh: bool) -> None:
        """Gives a prompt its share of the budget."""
        if chosen.budget <= 0:
            return
        if not sequence.scoring:
            if sequence.left:
                chosen.add(self._prefill(sequence, chosen.budget, fresh=fresh))
        elif chosen.score is None and (planned := self._score(sequence, chosen.budget)):
            chosen.score = planned
            chosen.budget -= planned.count

    def _admit_waiting(self, chosen: _Chosen) -> list[Sequence]:
        """Starts sequences while there are slots, pages and budget, in their order."""
        admitted = []
        deferred = 0
        for sequence in list(self.waiting):
            if chosen.budget <= 0 or deferred >= len(self._free_slots):
                break
            # A token of its own that is still on the device would be missing.
            if sequence.pending:
                continue
            matched, wait = self._matches(sequence)
            if wait:
                deferred += 1
                continue
            if not self._fits(sequence, matched):
                break
            self._admit(sequence, matched)
            admitted.append(sequence)
            self._go_on(sequence, chosen, fresh=True)
        return admitted

    def _decode(self, sequence: Sequence, repeat: int) -> Rows | None:
        steps = min(repeat, sequence.max_len - sequence.length)
        start = sequence.computed
        if not self._provide(sequence, start + steps):
            return None
        sequence.computed += steps
        sequence.pending += steps
        self._publish(sequence)
        return Rows(sequence, start, 1, steps, decode=True)

    def _prefill(self, sequence: Sequence, budget: int, *, fresh: bool) -> Rows | None:
        start = sequence.computed
        count = min(sequence.left, budget)
        if not self._provide(sequence, start + count):
            return None
        samples = int(count == sequence.left)
        sequence.computed += count
        sequence.pending += samples
        self._publish(sequence)
        return Rows(sequence, start, count, samples, decode=fresh and count == samples == 1)

    def _score(self, sequence: Sequence, budget: int) -> Rows | None:
        start = sequence.computed
        count = min(sequence.prompt_len - 1 - start, budget, self._score_tokens)
        if not self._provide(sequence, start + count):
            return None
        sequence.computed += count
        self._publish(sequence)
        return Rows(sequence, start, count, 0, decode=False)

    def _matches(self, sequence: Sequence) -> tuple[list[Node], bool]:
        """Pages that the prefix tree has for a waiting sequence, and whether it pays to wait.

        It does where this very step fills the page that comes next. The last known token is never
        matched: its logits are needed.
        """
        found: list[Node] = []
        if sequence.scored:
            return found, False
        node = self.pages.root(sequence.namespace)
        start = 0
        while start + self.pages.page_tokens < len(sequence.tokens):
            following = self.pages.following(node, sequence.tokens, start)
            if following is None:
                break
            if following.step >= self.step:
                return found, True
            found.append(following)
            node = following
            start += self.pages.page_tokens
        return found, False

    def _share(self, sequence: Sequence, node: Node) -> None:
        """Makes a node's page the sequence's next shared one, in place of its own if it has one."""
        page = self.pages.hold(node)
        if sequence.n_shared < len(sequence.pages):
            self.pages.release(sequence.pages[sequence.n_shared : sequence.n_shared + 1])
            sequence.pages[sequence.n_shared] = page
        else:
            sequence.pages.append(page)
        sequence.node = node
        sequence.n_shared += 1

    def _publish(self, sequence: Sequence) -> None:
        """Puts into the prefix tree what is computed of known tokens, in full pages."""
        Z = self.pages.page_tokens
        # The newest token of a reply may have ended it: then the device takes no step that would
        # write its keys, whatever was planned.
        written = max(sequence.prompt_len, len(sequence.tokens) - 1)
        known = min(sequence.computed, written)
        while (sequence.n_shared + 1) * Z <= known:
            start = sequence.n_shared * Z
            tokens = tuple(sequence.tokens[start : start + Z])
            parent = sequence.node or self.pages.root(sequence.namespace)
            own = sequence.pages[sequence.n_shared]
            node = self.pages.publish(parent, tokens, own, self.step)
            if node.page == own:
                sequence.node = node
                sequence.n_shared += 1
            elif node.step < self.step:
                self._share(sequence, node)
            else:
                break  # another one fills its page in this very step: it is for later ones

    def _fits(self, sequence: Sequence, matched: list[Node]) -> bool:
        """Whether pages suffice to run a waiting sequence's tokens without preempting anyone.

        What running prompts still need is left alone, and a page for each that goes on growing.
        """
        idle = self.pages.count_cached(matched)
        promised = sum(
            max(min(self._pages_for(s.length) + 1, self._pages_for(s.max_len)) - len(s.pages), 0)
            for s in self.running
        )
        length = min(len(sequence.tokens) + 1, sequence.max_len)
        need = self._pages_for(length) - len(matched)
        return need + promised <= self.pages.available - idle

    def _pages_for(self, n_tokens: int) -> int:
        return pages_for(n_tokens, self.pages.page_tokens)

    def _admit(self, sequence: Sequence, matched: list[Node]) -> None:
        self.waiting.remove(sequence)
        bisect.insort(self.running, sequence, key=_rank)
        sequence.slot = self._free_slots.pop()
        for node in matched:
            self._share(sequence, node)
        sequence.computed = sequence.n_shared * self.pages.page_tokens
        if not sequence.preemptions:
            sequence.cached = sequence.computed

    def _provide(self, sequence: Sequence, length: int) -> bool:
        """Gets the pages for `length` tokens, from sequences that rank lower if need be.

        If none ranks lower, it is this one that gives up its pages, and False is the answer.
        """
        while len(sequence.pages) * self.pages.page_tokens < length:
            if not self.pages.available:
                victim = self.running[-1]
                self._preempt(victim)
                if victim is sequence:
                    return False
            else:
                sequence.pages.append(self.pages.take())
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self._vacate(sequence)
        sequence.preemptions += 1
        self.preemptions += 1
        self.add(sequence)

    def _vacate(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self.pages.release(sequence.pages)
        self._free_slots.append(sequence.slot)
        sequence.slot, sequence.computed, sequence.pages = NO_SLOT, 0, []
        sequence.node, sequence.n_shared = None, 0


def _rank(sequence: Sequence) -> tuple[int, int]:
    return sequence.rank
