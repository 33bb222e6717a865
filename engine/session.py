"""One sequence with a cache of its own: the host loop of a single user.

A session keeps what it has computed: a prompt that begins like the conversation so far only pays
for what is new.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Generator, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from ..models.config import ModelConfig
from ..models.errors import StokerError
from ..models.parameters import Params
from . import steps
from .cache import PAGE_TOKENS, new_cache, pages_for
from .chunks import CHUNKS, chunk_batches, prefill_batch
from .programs import Programs
from .sampling import SamplingParams
from .steps import DecodeBatch, Outputs, PrefillBatch, new_state


@dataclasses.dataclass(frozen=True)
class Token:
    """One generated token: its id, and its log-probability under the model itself."""

    id: int
    logprob: float


class Session:
    """Generates and scores one sequence at a time.

    Args:
      params: the model's parameters.
      config: its architecture.
      context: longest sequence, prompt and reply together, in tokens.
      chunks: rows of the prefill steps to compile, each once it is needed or by `warmup`.

    Attributes:
      programs: the compiled steps.
      context: as given.
      reused: tokens of the latest prompt that were in the cache already.

    Raises:
      StokerError: if `context` is not from 1 to the model's `max_positions`.
    """

    def __init__(
        self, params: Params, config: ModelConfig, *, context: int, chunks: Sequence[int] = CHUNKS
    ) -> None:
        if not 1 <= context <= config.max_positions:
            raise StokerError(
                f"a context of {context} tokens was asked for; this model takes from 1 to "
                f"{config.max_positions}"
            )
        if not chunks or min(chunks) < 1:
            raise StokerError(f"chunk sizes {list(chunks)}: at least one is needed, each positive")
        self.params = params
        self.config = config = config.for_context(context)
        self.context = context
        self.programs = Programs(config)
        self.reused = 0
        self._chunks = tuple(sorted(set(chunks)))
        pages = pages_for(context, PAGE_TOKENS)
        self._n_pages = pages
        self._cache = new_cache(config, pages)
        self._page_table = jnp.arange(1, pages + 1, dtype=jnp.int32)[None]
        self._cached: list[int] = []
        self._turn = 0

    def reset(self) -> None:
        """Forgets what the cache holds; a reply that is under way cannot go on."""
        self._turn += 1
        self._cached = []

    def _begin(self, prompt: Sequence[int]) -> int:
        """Keeps of the cache what begins `prompt`; returns the number of this turn."""
        kept = self._cached[: self._shared_prefix(prompt)]
        # An interruption between a step's dispatch and its return loses the donated buffers.
        if any(pages.is_deleted() for pages in jax.tree.leaves(self._cache)):
            self._cache, kept = new_cache(self.config, self._n_pages), []
        self.reset()
        self._cached, self.reused = kept, len(kept)
        return self._turn

    def warmup(self, prompt: Sequence[int] | None = None) -> None:
        """Compiles what `generate` needs: for this prompt, or for any if None."""
        state = new_state([SamplingParams()])
        if prompt is None:
            sizes: set[int] = set(self._chunks)
        else:
            sizes = {batch.tokens.shape[0] for batch in self._prompt_chunks(prompt)}
        for rows in sorted(sizes):
            batch = prefill_batch([], [0], [0], self._page_table, rows)
            self.programs.prepare(steps.prefill, self.params, self._cache, state, batch)
        self.programs.prepare(steps.decode, self.params, self._cache, state, self._decode_batch())
        if prompt is None:
            self.programs.seal()

    def check_prompt(self, prompt: Sequence[int]) -> None:
        """Raises `StokerError` for a prompt that is empty, too long, or not of this vocabulary."""
        if not prompt:
            raise StokerError("the prompt is empty; give at least one token")
        if len(prompt) > self.context:
            raise StokerError(
                f"the prompt has {len(prompt)} tokens, but the context holds {self.context}"
            )
        for token in prompt:
            if not 0 <= token < self.config.vocab_size:
                raise StokerError(
                    f"token id {token} is not in the vocabulary of {self.config.vocab_size}"
                )

    def generate(
        self, prompt: Sequence[int], params: SamplingParams, stop_ids: Collection[int] = ()
    ) -> Generator[Token, None, None]:
        """Yields the tokens that follow `prompt`.

        Ends after a token of `stop_ids` (unless `params.ignore_eos`), after `params.max_tokens`,
        or where the context is full. A consumer may stop early: the cache stays valid, and a later
        prompt may go on from it. Each decode step is dispatched before the previous one's token is
        read, so that the device does not wait for Python.

        Raises:
          StokerError: as `check_prompt`, if the prompt leaves no room for a token, or where another
            call has used the session before this reply ended.
        """
        self.check_prompt(prompt)
        room = self.context - len(prompt)
        if room < 1:
            raise StokerError(
                f"the prompt has {len(prompt)} tokens and fills the context of {self.context}; "
                "nothing can be generated"
            )
        limit = min(params.max_tokens or room, room)
        state = new_state([params])
        turn = self._begin(prompt)
        for batch in self._prompt_chunks(prompt):
            self._cache, state, outputs = self.programs.prefill(
                self.params, self._cache, state, batch
            )
        self._cached = list(prompt)

        decode = self._decode_batch()
        for count in range(1, limit + 1):
            following: Outputs | None = None
            if count < limit:
                self._cache, state, following = self.programs.decode(
                    self.params, self._cache, state, decode
                )
            ids, logprobs = jax.device_get((outputs.tokens, outputs.logprobs))
            token = Token(int(ids[0]), float(logprobs[0]))
            if following is not None:
                self._cached.append(token.id)
            if not np.isfinite(token.logprob):
                self.reset()
                raise StokerError(
                    f"the model's logits are not finite after {len(prompt) + count - 1} tokens; "
                    "the weights may be damaged, or need a wider --dtype"
                )
            yield token
            if turn != self._turn:
                raise StokerError(
                    "another call has used this session since; a session serves one reply at a time"
                )
            if following is None or (token.id in stop_ids and not params.ignore_eos):
                return
            outputs = following

    def score(self, ids: Sequence[int]) -> list[float | None]:
        """Log-probability of each of `ids` after those before it; the first is None.

        Raises:
          StokerError: as `check_prompt`.
        """
        self.check_prompt(ids)
        self.reset()
        self._begin(ids)
        state = new_state([SamplingParams()])
        scores: list[float | None] = [None]
        for batch in self._prompt_chunks(ids):
            start, rows = int(batch.cached[0]), int(batch.query_start[1])
            targets = np.zeros(batch.tokens.shape, np.int32)
            following = ids[start + 1 : start + rows + 1]
            targets[: len(following)] = following
            self._cache, state, logprobs = self.programs.score(
                self.params, self._cache, state, batch, jnp.asarray(targets)
            )
            scores.extend(jax.device_get(logprobs)[: len(following)].tolist())
        self._cached = list(ids)
        return scores

    def _shared_prefix(self, prompt: Sequence[int]) -> int:
        """Leading tokens that are cached; never all, since the last one's logits are needed."""
        shared = 0
        for cached, wanted in zip(self._cached, prompt[:-1], strict=False):
            if cached != wanted:
                break
            shared += 1
        return shared

    def _prompt_chunks(self, prompt: Sequence[int]) -> Iterator[PrefillBatch]:
        """The chunks that bring the cache from `_cached` to `prompt`."""
        return chunk_batches([prompt], [len(self._cached)], self._page_table, self._chunks)

    def _decode_batch(self) -> DecodeBatch:
        return DecodeBatch(active=jnp.array([True]), page_table=self._page_table)
