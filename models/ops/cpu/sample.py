"""Choosing tokens from logits, and the largest of each row, by the compiled kernels."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from ...errors import StokerError
from ..sampling import WORD, Sampling
from .library import load, why_unavailable
from .matmul import isa_number

#: Arrays of `Sampling` that the kernel reads, in its order, and their types and axes.
_FIELDS = {
    "temperature": (jnp.float32, 1),
    "top_k": (jnp.int32, 1),
    "top_p": (jnp.float32, 1),
    "min_p": (jnp.float32, 1),
    "repetition": (jnp.float32, 1),
    "presence": (jnp.float32, 1),
    "frequency": (jnp.float32, 1),
    "bias_ids": (jnp.int32, 2),
    "bias_values": (jnp.float32, 2),
    "allowed": (jnp.uint32, 2),
    "has_mask": (jnp.bool_, 1),
    "end_ids": (jnp.int32, 2),
    "min_lens": (jnp.int32, 1),
    "prompt_lens": (jnp.int32, 1),
}


def sample(
    logits: jax.Array,
    sampling: Sampling,
    history: jax.Array,
    slots: jax.Array,
    positions: jax.Array,
    uniform: jax.Array,
    *,
    isa: str = "best",
    threads: int = 0,
) -> tuple[jax.Array, jax.Array]:
    """One token for each row, and the logarithm of the sum of the row's exponentials.

    Rows of `sampling` and `history` are read where they lie, and only what the row's edits need. A
    row's bits depend on that row only: not on B, the threads or the instruction set.

    Args:
      logits: as all that follow and both results, of `xla.sample`.
      sampling: see there.
      history: see there.
      slots: see there.
      positions: see there.
      uniform: see there.
      isa: one of `library.ISAS`.
      threads: most threads to use; 0 for all that XLA has.

    Raises:
      StokerError: the kernels are not available, or shapes or types do not fit.
    """
    _check(logits)
    rows, held = logits.shape[:1], sampling.temperature.shape[:1]
    fields = {name: getattr(sampling, name) for name in _FIELDS}
    for name, (dtype, axes) in _FIELDS.items():
        _expect(name, fields[name], dtype, (*held, *_second(fields[name]))[:axes])
    _expect("bias_values", sampling.bias_values, jnp.float32, sampling.bias_ids.shape)
    _expect("allowed", sampling.allowed, jnp.uint32, (*held, -(-logits.shape[1] // WORD)))
    _expect("history", history, jnp.int32, (*held, *_second(history)))
    _expect("slots", slots, jnp.int32, rows)
    _expect("positions", positions, jnp.int32, rows)
    _expect("uniform", uniform, jnp.float32, rows)
    call = jax.ffi.ffi_call(
        "stoker_sample",
        (jax.ShapeDtypeStruct(rows, jnp.int32), jax.ShapeDtypeStruct(rows, jnp.float32)),
        vmap_method="sequential",
    )
    tokens, total = call(
        logits,
        *fields.values(),
        history,
        slots,
        positions,
        uniform,
        isa=np.int64(isa_number(isa)),
        threads=np.int64(threads),
    )
    return tokens, total


def logsumexp(logits: jax.Array, *, isa: str = "best", threads: int = 0) -> jax.Array:
    """The second result of `sample` alone, bit for bit.

    Raises:
      StokerError: the kernels are not available, or the logits' shape or type does not fit.
    """
    _check(logits)
    call = jax.ffi.ffi_call(
        "stoker_logsumexp",
        jax.ShapeDtypeStruct(logits.shape[:1], jnp.float32),
        vmap_method="sequential",
    )
    return call(logits, isa=np.int64(isa_number(isa)), threads=np.int64(threads))


def largest(
    logits: jax.Array, wanted: jax.Array, count: int, *, isa: str = "best", threads: int = 0
) -> tuple[jax.Array, jax.Array]:
    """The largest of each wanted row of `logits [B, V]`, and their ids; both `[B, count]`.

    Args and results as of `xla.largest`; rows that are not wanted (bool `[B]`) hold -inf and -1,
    and so do rows with NaN or +inf.

    Raises:
      StokerError: the kernels are not available, or shapes or types do not fit.
    """
    _check(logits)
    _expect("wanted", wanted, jnp.bool_, logits.shape[:1])
    shape = (logits.shape[0], count)
    call = jax.ffi.ffi_call(
        "stoker_largest",
        (jax.ShapeDtypeStruct(shape, jnp.float32), jax.ShapeDtypeStruct(shape, jnp.int32)),
        vmap_method="sequential",
    )
    values, ids = call(logits, wanted, isa=np.int64(isa_number(isa)), threads=np.int64(threads))
    return values, ids


def _check(logits: jax.Array) -> None:
    if load() is None:
        raise StokerError(str(why_unavailable()))
    if logits.ndim != 2 or logits.shape[1] < 1 or logits.dtype != jnp.float32:
        raise StokerError(
            f"sampling got logits of {logits.dtype} {list(logits.shape)}; they must be float32 "
            "[B, V] with V of at least 1"
        )


def _expect(name: str, array: jax.Array, dtype: type, shape: tuple[int, ...]) -> None:
    if array.shape != shape or array.dtype != dtype:
        raise StokerError(
            f"sampling got {name} of {array.dtype} {list(array.shape)}; it must be "
            f"{jnp.dtype(dtype)} {list(shape)}"
        )


def _second(array: jax.Array) -> tuple[int, ...]:
    """The size of an array's second axis, 0 where it has none."""
    return (array.shape[1] if array.ndim > 1 else 0,)
