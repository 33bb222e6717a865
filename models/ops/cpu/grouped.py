"""Products of grouped rows, each with the matrix of its group, by the compiled kernels."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from ...errors import StokerError
from .matmul import (
    BEFORE,
    Readable,
    check_gate,
    check_input,
    check_weight,
    scratch_bytes,
    weight_fields,
)


def grouped_products(
    x: jax.Array,
    weights: Sequence[Readable],
    sizes: jax.Array,
    *,
    biases: Sequence[jax.Array | None] | None = None,
    rows: jax.Array | None = None,
    activations: str = "int8",
    isa: str = "best",
    threads: int = 0,
) -> tuple[jax.Array, ...]:
    """Rows `x [T, C]` times the transpose of their group's matrix of each weight `[E, R_i, C]`.

    The matrices of each group that has rows are read once, those of others not at all. A row's
    bits depend on that row, its matrix and its bias only: not on its neighbours or the threads.

    Args:
      x: float32, bfloat16 or float16; the first `sizes[0]` rows belong to group 0, and so on.
      weights: packed, or dense of float32, bfloat16 or float16; any mixture.
      sizes: int32 `[E]`. Rows past their sum belong to no group and yield zeros. Negative sizes,
        or a sum of more than T, are an error of the runtime when the call is executed.
      biases: float32 `[E, R_i]` that are added, or None, for each weight.
      rows: int32 `[T]`; what is multiplied are these rows of x, which may then have any number.
        Rows outside x are an error of the runtime.
      activations: as of `products`.
      isa: one of `library.ISAS`.
      threads: most threads to use; 0 for all that XLA has.

    Returns:
      float32 `[T, R_i]` for each weight.

    Raises:
      StokerError: the kernels are not available, or shapes or types do not fit.
    """
    biases = biases or (None,) * len(weights)
    before = "" if rows is None else "rows"
    return _call(x, None, before, weights, sizes, biases, activations, isa, threads, rows)


def grouped_gated_matmul(
    gate: jax.Array,
    up: jax.Array,
    weight: Readable,
    sizes: jax.Array,
    *,
    activation: str = "silu",
    bias: jax.Array | None = None,
    activations: str = "int8",
    isa: str = "best",
    threads: int = 0,
) -> jax.Array:
    """`gated(gate, up)`, both `[T, C]`, times their group's matrix of `weight [E, R, C]`.

    `activation` is one of `models.config.ACTIVATIONS`, computed in float32; the rest as for
    `grouped_products`. Gives float32 `[T, R]`.
    """
    check_gate(gate, up, activation)
    return _call(*(gate, up, activation, (weight,), sizes, (bias,)), activations, isa, threads)[0]


def _call(
    x: jax.Array,
    other: jax.Array | None,
    before: str,
    weights: Sequence[Readable],
    sizes: jax.Array,
    biases: Sequence[jax.Array | None],
    activations: str,
    isa: str,
    threads: int,
    rows: jax.Array | None = None,
) -> tuple[jax.Array, ...]:
    """Checks, then the foreign call; `before` is one of `BEFORE`, what x goes through first."""
    isa_index = check_input(x, activations, isa)
    if sizes.ndim != 1 or sizes.dtype != jnp.int32:
        raise StokerError(
            f"sizes of groups are {sizes.dtype}{list(sizes.shape)}; they must be an int32 vector"
        )
    if len(biases) != len(weights):
        raise StokerError(f"{len(biases)} biases for {len(weights)} weights; give one for each")
    added = []
    for weight, bias in zip(weights, biases, strict=True):
        check_weight(weight, x.shape[1:], sizes.shape)
        if bias is not None and (bias.shape != weight.shape[:2] or bias.dtype != jnp.float32):
            raise StokerError(
                f"bias {bias.dtype}{list(bias.shape)} of a weight {list(weight.shape)} must be "
                f"float32{list(weight.shape[:2])}"
            )
        added.append(jnp.zeros((0, 0), jnp.float32) if bias is None else bias)

    if rows is not None and (rows.ndim != 1 or rows.dtype != jnp.int32):
        raise StokerError(f"rows are {rows.dtype}{list(rows.shape)}; they must be an int32 vector")
    T, C = x.shape if rows is None else (rows.shape[0], x.shape[1])
    exact = activations == "float32"
    wide = x.astype(jnp.float32)
    shapes = [jax.ShapeDtypeStruct((T, weight.shape[1]), jnp.float32) for weight in weights]
    scratch = scratch_bytes(weights, T, C, exact, bool(before))
    shapes.append(jax.ShapeDtypeStruct((scratch,), jnp.uint8))
    call = jax.ffi.ffi_call("stoker_grouped_matmul", shapes, vmap_method="sequential")
    *results, _ = call(
        wide,
        wide if other is None else other.astype(jnp.float32),
        jnp.zeros(0, jnp.int32) if rows is None else rows,
        sizes,
        *(leaf for weight in weights for leaf in jax.tree.leaves(weight)),
        *added,
        weights=np.array(
            [field for weight in weights for field in weight_fields(weight)], np.int64
        ),
        before=np.int64(BEFORE.index(before)),
        exact=exact,
        isa=np.int64(isa_index),
        threads=np.int64(threads),
    )
    return tuple(results)
