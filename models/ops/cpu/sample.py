"""Choosing tokens from logits, and the largest of each row, by the compiled kernels."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from ...errors import StokerError
from .library import load, why_unavailable
from .matmul import isa_number


def sample(
    logits: jax.Array,
    temperature: jax.Array,
    top_k: jax.Array,
    top_p: jax.Array,
    min_p: jax.Array,
    uniform: jax.Array,
    *,
    isa: str = "best",
    threads: int = 0,
) -> tuple[jax.Array, jax.Array]:
    """One token for each row, and the logarithm of the sum of the row's exponentials.

    A row's bits depend on that row only: not on B, the threads or the instruction set.

    Args:
      logits: as all that follow and both results, of `xla.sample`.
      temperature: see there.
      top_k: see there.
      top_p: see there.
      min_p: see there.
      uniform: see there.
      isa: one of `library.ISAS`.
      threads: most threads to use; 0 for all that XLA has.

    Raises:
      StokerError: the kernels are not available, or shapes or types do not fit.
    """
    _check(logits)
    rows = logits.shape[:1]
    columns = {
        "temperature": (temperature, jnp.float32),
        "top_k": (top_k, jnp.int32),
        "top_p": (top_p, jnp.float32),
        "min_p": (min_p, jnp.float32),
        "uniform": (uniform, jnp.float32),
    }
    for name, (column, dtype) in columns.items():
        if column.shape != rows or column.dtype != dtype:
            raise StokerError(
                f"sample got {name} of {column.dtype} {list(column.shape)}; it must be "
                f"{jnp.dtype(dtype)} {list(rows)}"
            )
    call = jax.ffi.ffi_call(
        "stoker_sample",
        (jax.ShapeDtypeStruct(rows, jnp.int32), jax.ShapeDtypeStruct(rows, jnp.float32)),
        vmap_method="sequential",
    )
    tokens, total = call(
        logits,
        *(column for column, _ in columns.values()),
        isa=np.int64(isa_number(isa)),
        threads=np.int64(threads),
    )
    return tokens, total


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
    if wanted.shape != logits.shape[:1] or wanted.dtype != jnp.bool_:
        raise StokerError(
            f"largest got wanted of {wanted.dtype} {list(wanted.shape)}; it must be bool "
            f"{list(logits.shape[:1])}"
        )
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
