"""What steps run on: parameters, cache, state, page table and compiled programs of one engine.

Where several processes run one model, each has its own, and all get the same calls in the same
order; `engine/hosts.py` sees to that.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ..models.config import ModelConfig
from ..models.ops.layout import DUMP_PAGE
from ..models.pages import whole_page_tokens
from ..models.parameters import Params
from . import steps
from .cache import Cache, new_cache
from .on_mesh import slot_spec
from .pages import pages_for
from .programs import Programs
from .sampling_params import MAX_TOP, SamplingParams
from .steps import DecodeBatch, PrefillBatch, State

#: Steps by the number that stands for them between processes.
STEPS = (steps.prefill, steps.decode, steps.decode_steps, steps.score)
PREFILL, DECODE, DECODE_STEPS, SCORE = range(len(STEPS))


class Device:
    """One engine's side of the device.

    Args:
      params: the model's parameters.
      config: its architecture.
      slots: rows of the state (S); on a mesh, of each part of its data axis.
      context: most tokens of a sequence.
      n_pages: usable pages of the cache, likewise.
      end_ids: the model's end tokens: they end replies, but not before `min_tokens`.
      mesh: what the model is split over, if not on one device.

    Attributes:
      programs: the compiled steps.
      cache, state: donated to each step, and replaced by what it returns.
    """

    def __init__(
        self,
        params: Params,
        config: ModelConfig,
        *,
        slots: int,
        context: int,
        n_pages: int,
        end_ids: Sequence[int],
        mesh: Mesh | None = None,
    ) -> None:
        self.programs = Programs(config, MAX_TOP, mesh)
        self._mesh = mesh
        self._parts = config.split.degree("slots")
        self._page_tokens = whole_page_tokens(config)
        self._params = params
        self._config = config
        self._slots = slots
        self._context = context
        self._n_pages = n_pages
        self._end_ids = tuple(end_ids)
        self._start()

    def reset(self) -> None:
        """Starts with an empty cache and state, whatever became of the old ones."""
        self._start()

    def _start(self) -> None:
        self.cache: Cache = ()  # the old one goes first: there may not be memory for both
        self.cache = new_cache(self._config, self._n_pages, mesh=self._mesh)
        # With a seed: all processes start alike.
        idle = [SamplingParams(seed=0)] * (self._slots * self._parts)
        state = steps.new_state(idle, self._config.vocab_size, self._context, end_ids=self._end_ids)
        if self._mesh is not None:
            state = _spread(state, self._mesh, slot_spec(self._config))
        self.state = state
        # Row S is padding's.
        shape = (self._parts, self._slots + 1, pages_for(self._context, self._page_tokens))
        self._table: Any = np.full(shape, DUMP_PAGE, np.int32)

    def list_pages(self, place: int, first: int, pages: Sequence[int]) -> None:
        """The page table of the slot at `place`, counted over all parts, from `first` on."""
        part, slot = divmod(place, self._slots)
        self._table[part, slot, first : first + len(pages)] = pages

    def admit(self, place: int, row: State) -> None:
        """Sets the slot at `place` to what `row` says: `steps.admit`."""
        self.state = self.programs.admit(self.state, np.int32(place), row)

    def prepare(self, step: int, arrays: Sequence[Any], repeat: int = 0) -> None:
        """Compiles what `run` would run."""
        static = {"steps": repeat} if step == DECODE_STEPS else {}
        batch = self._batch(step, arrays)
        step_of = STEPS[step]
        self.programs.prepare(step_of, self._params, self.cache, self.state, *batch, **static)

    def run(self, step: int, arrays: Sequence[Any], repeat: int = 0) -> Any:
        """Runs a step: what it found may not be there yet.

        Args:
          step: its number.
          arrays: of `DecodeBatch` or `PrefillBatch` in their order, but without the page table,
            and `targets` after them for scores.
          repeat: how often, for `DECODE_STEPS`.

        Returns:
          `Outputs`, or `Scores` of `SCORE`.
        """
        batch: Any = self._batch(step, arrays)
        start = (self._params, self.cache, self.state)
        found: Any
        if step == PREFILL:
            self.cache, self.state, found = self.programs.prefill(*start, *batch)
        elif step == DECODE:
            self.cache, self.state, found = self.programs.decode(*start, *batch)
        elif step == DECODE_STEPS:
            self.cache, self.state, found = self.programs.decode_steps(*start, batch[0], repeat)
        else:
            self.cache, self.state, found = self.programs.score(*start, *batch)
        return found

    def seal(self) -> None:
        """Declares warm-up finished."""
        self.programs.seal()

    def fetch(self, found: Any) -> Any:
        """Waits for what steps found, and returns it as NumPy arrays."""
        return jax.device_get(found)

    def _batch(self, step: int, arrays: Sequence[Any]) -> tuple[Any, ...]:
        if step in (DECODE, DECODE_STEPS):
            slots, limits = arrays
            return (DecodeBatch(self._pages_of(slots), slots, limits),)
        tokens, query_start, cached, slots, samples, *rest = arrays
        pages = self._pages_of(slots)
        return (PrefillBatch(tokens, query_start, cached, pages, slots, samples), *rest)

    def _pages_of(self, slots: Any) -> Any:
        """int32 `[B, M]`: the table's rows of `slots`, those of the parts one after another."""
        own = slots.reshape(self._parts, -1)
        parts = np.arange(self._parts)[:, None]
        return self._table[parts, own].reshape(slots.size, -1)


def _spread(tree: Any, mesh: Mesh, spec: PartitionSpec) -> Any:
    """Arrays of this process, the same in all, over the whole of `mesh`: as XLA's own memory."""
    nowhere = NamedSharding(mesh, PartitionSpec())
    copy = jax.jit(
        lambda arrays: jax.tree.map(jnp.copy, arrays),
        in_shardings=nowhere,
        out_shardings=NamedSharding(mesh, spec),
    )
    return copy(jax.tree.map(np.asarray, tree))
