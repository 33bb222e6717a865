"""What a request asks of sampling: one frozen value, checked when it is made."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from ..models.errors import StokerError

MAX_TEMPERATURE = 100.0
MAX_SEED = 2**63 - 1
#: Largest count or token id; what the device holds of one.
MAX_COUNT = 2**31 - 1
MAX_CHOICES = 128
MAX_STOPS = 16
MAX_BIASES = 512
#: A bias of this much forces the token, its negative bans it.
MAX_BIAS = 100.0
#: Most alternatives that are reported beside a token.
MAX_TOP = 20


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """How to choose the tokens of one reply. Each value is checked when this is made.

    Attributes:
      temperature: 0 takes the most likely token; up to `MAX_TEMPERATURE`.
      top_k: keep the k most likely tokens; 0 or -1 for all.
      top_p: keep the fewest most likely tokens whose probabilities add up to this; in [0, 1].
      min_p: keep tokens at least this share of the most likely one's probability; in [0, 1].
      seed: 0..2**63-1; None draws a fresh one.
      max_tokens: most tokens to generate, cut to what the context leaves; None for all of that.
        0, for scoring alone, takes `prompt_logprobs`.
      stop: strings that end the reply and are cut from it, `MAX_STOPS` at most.
      ignore_eos: generate past the model's end tokens; `stop` and `stop_ids` still end the reply.
      n: replies to one prompt, 1..`MAX_CHOICES`; `child` gives the parameters of each.
      repetition_penalty: divides positive logits of tokens that the prompt or the reply holds, and
        multiplies negative ones (Keskar et al. 2019, as Hugging Face applies it); in [0.01, 100].
      presence_penalty: subtracted from the logits of tokens that the reply holds; in [-2, 2].
      frequency_penalty: subtracted once for each time the reply holds the token; in [-2, 2].
      logit_bias: added to the logits of token ids; in [-100, 100]. -100 bans the token; where any
        token has 100, only tokens that have 100 are generated. Takes a mapping, whose keys may be
        strings of digits as in JSON; kept as pairs sorted by id, `MAX_BIASES` at most.
      stop_ids: token ids that end the reply, even before `min_tokens`.
      min_tokens: tokens before which the model's end tokens are not generated. A token that
        `stop_ids` names too is generated, and ends the reply.
      logprobs: alternatives to report beside each token, 0..`MAX_TOP`; None reports nothing.
      prompt_logprobs: the same for the tokens of the prompt.
      allowed_ids: the only token ids that may be generated; None for all.

    Raises:
      StokerError: for a value out of range, naming it.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    n: int = 1
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | tuple[tuple[int, float], ...] = ()
    stop_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    allowed_ids: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        def keep(name: str, value: object) -> None:
            object.__setattr__(self, name, value)

        for name, (low, high) in _RANGES.items():
            keep(name, _number(name, getattr(self, name), low, high))
        for name, (low, high) in _COUNTS.items():
            value = getattr(self, name)
            if value is not None or name not in _OPTIONAL:
                keep(name, _integer(name, value, low, high))
        if not isinstance(self.ignore_eos, bool | np.bool_):
            raise StokerError(f"ignore_eos is {self.ignore_eos!r}; it must be true or false")
        if self.max_tokens == 0 and self.prompt_logprobs is None:
            raise StokerError(
                "max_tokens is 0, which is for scoring a prompt; give prompt_logprobs too, or at "
                "least 1"
            )
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise StokerError(
                f"min_tokens is {self.min_tokens}; it must be at most max_tokens, {self.max_tokens}"
            )
        keep("ignore_eos", bool(self.ignore_eos))
        keep("stop", _stops(self.stop))
        keep("stop_ids", _ids("stop_ids", self.stop_ids))
        if self.allowed_ids is not None:
            keep("allowed_ids", _ids("allowed_ids", self.allowed_ids))
            if not self.allowed_ids:
                raise StokerError("allowed_ids is empty; name at least one token id, or None")
        keep("logit_bias", _biases(self.logit_bias))

    @property
    def biases(self) -> tuple[tuple[int, float], ...]:
        """`logit_bias` as pairs of token id and value, sorted by id."""
        assert isinstance(self.logit_bias, tuple)
        return self.logit_bias

    def check(self, vocab_size: int) -> np.ndarray:
        """bool `[V]`: what `allowed_ids` and biases of -100 and 100 let be generated.

        Raises:
          StokerError: for a token id outside the vocabulary, naming field and id, or where no
            token is left.
        """
        biased = [token for token, _ in self.biases]
        named = {
            "logit_bias": biased,
            "stop_ids": self.stop_ids,
            "allowed_ids": self.allowed_ids or (),
        }
        for name, ids in named.items():
            if ids and (largest := max(ids)) >= vocab_size:
                raise StokerError(
                    f"{name} names token id {largest}; this model's vocabulary has ids 0 to "
                    f"{vocab_size - 1}"
                )
        mask = self._allowed(vocab_size)
        if not mask.any():
            raise StokerError(
                f"logit_bias {dict(self.biases)} leaves no token that may be generated; ban fewer "
                "tokens, or allow more"
            )
        return mask

    def _allowed(self, vocab_size: int) -> np.ndarray:
        mask = np.ones(vocab_size, bool)
        if self.allowed_ids is not None:
            mask = _only(self.allowed_ids, vocab_size)
        if forced := [token for token, value in self.biases if value == MAX_BIAS]:
            mask &= _only(forced, vocab_size)
        mask[[token for token, value in self.biases if value == -MAX_BIAS]] = False
        return mask

    def child(self, choice: int) -> SamplingParams:
        """The parameters of reply `choice` of `n`: n is 1, and the seed its own.

        Reply 0 keeps the seed; the others' are derived from it, the same each time. Without a seed
        each draws a fresh one.

        Raises:
          StokerError: unless `choice` is from 0 to n - 1.
        """
        _integer("choice", choice, 0, self.n - 1)
        seed = self.seed
        if seed is not None and choice > 0:
            digest = hashlib.blake2b(f"{seed}/{choice}".encode(), digest_size=8).digest()
            seed = int.from_bytes(digest, "little") >> 1
        return dataclasses.replace(self, n=1, seed=seed)


def _only(ids: Iterable[int], vocab_size: int) -> np.ndarray:
    mask = np.zeros(vocab_size, bool)
    mask[list(ids)] = True
    return mask


#: Fields that hold a number, and their ranges.
_RANGES: dict[str, tuple[float, float]] = {
    "temperature": (0, MAX_TEMPERATURE),
    "top_p": (0, 1),
    "min_p": (0, 1),
    "repetition_penalty": (0.01, 100),
    "presence_penalty": (-2, 2),
    "frequency_penalty": (-2, 2),
}
#: Fields that hold a whole number, and their ranges.
_COUNTS: dict[str, tuple[int, int]] = {
    "top_k": (-1, MAX_COUNT),
    "seed": (0, MAX_SEED),
    "max_tokens": (0, MAX_COUNT),
    "n": (1, MAX_CHOICES),
    "min_tokens": (0, MAX_COUNT),
    "logprobs": (0, MAX_TOP),
    "prompt_logprobs": (0, MAX_TOP),
}
_OPTIONAL = ("seed", "max_tokens", "logprobs", "prompt_logprobs")


def _number(name: str, value: Any, low: float, high: float) -> float:
    # NaN compares false with everything.
    real = isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)
    if not (real and low <= value <= high):
        raise StokerError(f"{name} is {_shown(value)}; it must be a number from {low} to {high}")
    return float(value)


def _integer(name: str, value: Any, low: int, high: int) -> int:
    whole = isinstance(value, int | np.integer) and not isinstance(value, bool)
    if not (whole and low <= value <= high):
        raise StokerError(
            f"{name} is {_shown(value)}; it must be a whole number from {low} to {high}"
        )
    return int(value)


def _shown(value: object) -> str:
    """A value as an error shows it: Python refuses to print integers of thousands of digits."""
    if isinstance(value, int) and value.bit_length() > 256:
        return "a huge number"
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _items(name: str, values: Any) -> list[Any]:
    if isinstance(values, str | bytes | Mapping) or not isinstance(values, Iterable):
        raise StokerError(f"{name} is {_shown(values)}; it must be a list")
    return list(values)


def _stops(values: Any) -> tuple[str, ...]:
    texts = [values] if isinstance(values, str) else _items("stop", values)
    if len(texts) > MAX_STOPS:
        raise StokerError(f"stop holds {len(texts)} strings; it takes at most {MAX_STOPS}")
    for text in texts:
        if not isinstance(text, str) or not text:
            raise StokerError(f"stop holds {_shown(text)}; it takes non-empty strings")
    return tuple(texts)


def _ids(name: str, values: Any) -> tuple[int, ...]:
    """Token ids, sorted, each once."""
    return tuple(sorted({_token(name, value) for value in _items(name, values)}))


def _token(name: str, value: Any) -> int:
    whole = isinstance(value, int | np.integer) and not isinstance(value, bool)
    if not (whole and 0 <= value <= MAX_COUNT):
        raise StokerError(f"{name} holds {_shown(value)}; it takes token ids, from 0 up")
    return int(value)


def _biases(values: Any) -> tuple[tuple[int, float], ...]:
    if isinstance(values, Mapping):
        values = values.items()
    pairs = _items("logit_bias", values)
    if len(pairs) > MAX_BIASES:
        raise StokerError(f"logit_bias has {len(pairs)} entries; it takes at most {MAX_BIASES}")
    biases: dict[int, float] = {}
    for pair in pairs:
        if not isinstance(pair, tuple) or len(pair) != 2:
            raise StokerError(
                f"logit_bias holds {_shown(pair)}; it takes pairs of a token id and a number"
            )
        key, value = pair
        if isinstance(key, str) and key.isascii() and key.isdigit() and len(key) <= 10:
            key = int(key)
        token = _token("logit_bias", key)
        number = f"logit_bias of token {token}"
        if token in biases:
            raise StokerError(f"{number} is given twice; give it once")
        biases[token] = _number(number, value, -MAX_BIAS, MAX_BIAS)
    return tuple(sorted((token, value) for token, value in biases.items() if value))
