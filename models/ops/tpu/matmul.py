"""Products with weights that are read as they are stored, and made wide in vector memory."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ...errors import StokerError
from ...quantized import QuantArray, Weight
from ..visits import Visits, group_visits, halves, one_group
from .common import EXACT, LANES, VMEM_BYTES
from .widen import PIECE, Format, format_of, read_scales, scratch_width, why_unsupported, widen

#: Bytes of weights of a block: enough for a transfer to be worth its start.
_BLOCK_BYTES = 2**20
#: Bytes of a block of activations, and most of its rows.
_ROWS_BYTES, _ROWS = 4 * 2**20, 512


def matmul(
    x: jax.Array,
    weight: QuantArray,
    *,
    dtype: Any = jnp.float32,
    interpret: Any = False,
) -> jax.Array:
    """`x [T, C]` times the transpose of a quantised `weight [R, C]`: `[T, R]` of `dtype`.

    Codes and scales are read once for every `_ROWS` rows of x; the weights that they stand for
    exist in vector memory only, a few columns at a time, rounded to x's type. Sums are float32.

    Args:
      x: bfloat16 or float32.
      weight: what `why_unsupported` has nothing against.
      dtype: of the result.
      interpret: run the kernel as plain JAX, on any platform.

    Raises:
      StokerError: for a format that the kernel does not read.
    """
    T, C = x.shape
    rows = row_block(T, C, x.dtype)
    leading = jax.tree.map(lambda leaf: leaf[None], weight)
    return _product(x, leading, one_group(T, rows), rows, dtype, interpret)


def grouped_matmul(
    x: jax.Array,
    weight: Weight,
    sizes: jax.Array,
    *,
    dtype: Any = jnp.float32,
    interpret: Any = False,
) -> jax.Array:
    """Rows `x [T, C]`, sorted by group, times the transpose of their group's matrix.

    A group's matrix is read once for every block of rows that it meets; those of groups without
    rows are not read.

    Args:
      x: the first `sizes[0]` rows belong to group 0, and so on; bfloat16 or float32.
      weight: `[E, R, C]`, dense or quantised.
      sizes: int32 `[E]`, which sum to T.
      dtype: of the result.
      interpret: run the kernel as plain JAX, on any platform.

    Returns:
      `[T, R]` of `dtype`, computed as `matmul` does.

    Raises:
      StokerError: for a format that the kernel does not read.
    """
    T = x.shape[0]
    rows = row_block(T, x.shape[1], x.dtype)
    return _product(x, weight, group_visits(sizes, T, rows), rows, dtype, interpret)


def row_block(T: int, C: int, dtype: Any) -> int:
    """Rows of x that are multiplied at once: all, or as many as fit."""
    most = min(_ROWS, _ROWS_BYTES // (C * jnp.dtype(dtype).itemsize))
    most = max(most // LANES * LANES, LANES)
    return T if most >= T else most


def output_block(R: int, row_bytes: int) -> int:
    """Outputs of a block: whole registers, about `_BLOCK_BYTES` of weights."""
    if R <= LANES:
        return R
    return max(LANES, min(_BLOCK_BYTES // row_bytes // LANES * LANES, 512, R // LANES * LANES))


def _product(
    x: jax.Array, weight: Weight, visits: Visits, rows: int, dtype: Any, interpret: Any
) -> jax.Array:
    """Rows of x by the matrices `weight [E, R, C]` that `visits` name."""
    T, R = x.shape[0], weight.shape[-2]
    if isinstance(weight, QuantArray):
        reason = why_unsupported(weight)
        if reason:
            raise StokerError(
                f"the TPU kernel cannot read a weight of shape {list(weight.shape)}: {reason}; "
                "use kernels='xla'"
            )
        format_, leaves = format_of(weight)
    else:
        format_, leaves = None, [weight]
    operands = halves(x, format_.span) if format_ is not None and format_.bits == 4 else [x]
    block = output_block(R, leaves[0].shape[-1] * leaves[0].dtype.itemsize)
    scratch = []
    if format_ is not None:
        n = 2 if format_.kinds[1] else 1
        scratch = [pltpu.VMEM((block, scratch_width(format_)), jnp.float32)] * n

    def at_tile(r: Any, v: Any, group: Any, tile: Any, *_: Any) -> tuple[Any, ...]:
        return tile[v], 0

    def at_group(r: Any, v: Any, group: Any, *_: Any) -> tuple[Any, ...]:
        return group[v], r, 0

    def across_group(r: Any, v: Any, group: Any, *_: Any) -> tuple[Any, ...]:
        return group[v], 0, r

    turned = (False, *(format_.turned if format_ else ()))
    return pl.pallas_call(
        functools.partial(_kernel, format_=format_, n_x=len(operands), rows=rows),
        out_shape=jax.ShapeDtypeStruct((T, R), dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=4,
            grid=(-(-R // block), visits.tile.shape[0]),
            in_specs=[
                *(pl.BlockSpec((rows, part.shape[1]), at_tile) for part in operands),
                *(
                    pl.BlockSpec((1, leaf.shape[-2], block), across_group)
                    if turn
                    else pl.BlockSpec((1, block, leaf.shape[-1]), at_group)
                    for leaf, turn in zip(leaves, turned, strict=True)
                ),
            ],
            out_specs=pl.BlockSpec((rows, block), lambda r, v, group, tile, *_: (tile[v], r)),
            scratch_shapes=[pltpu.VMEM((rows, block), jnp.float32), *scratch],
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=VMEM_BYTES
        ),
        interpret=interpret,
        name="stoker_matmul" if weight.shape[0] == 1 else "stoker_grouped_matmul",
    )(visits.group, visits.tile, visits.first, visits.last, *operands, *leaves)


def _kernel(
    group_ref: Any,
    tile_ref: Any,
    first_ref: Any,
    last_ref: Any,
    *refs: Any,
    format_: Format | None,
    n_x: int,
    rows: int,
) -> None:
    """A block of outputs for the rows of one visit."""
    n_factors = 0 if format_ is None else sum(map(bool, format_.kinds))
    x_refs, codes_ref = refs[:n_x], refs[n_x]
    factor_refs = list(refs[n_x + 1 : n_x + 1 + n_factors])
    out_ref, sum_ref, *scratch = refs[n_x + 1 + n_factors :]
    v = pl.program_id(1)
    first, last = first_ref[v], last_ref[v]

    @pl.when(first < last)
    def _() -> None:
        if format_ is not None:
            read_scales(factor_refs, format_, scratch)
        sum_ref[...] = jnp.zeros(sum_ref.shape, jnp.float32)
        work = x_refs[0].dtype
        precision = EXACT if work == jnp.float32 else None

        def piece(start: Any, width: int) -> None:
            """Adds the products of some columns: `width` bytes of codes from `start` on."""
            columns = pl.ds(start, width)
            stored = codes_ref[0, :, columns]
            if format_ is None:
                wide = [stored.astype(work)]
            else:
                wide = widen(stored, start, format_, scratch, work)
            for x_ref, weights in zip(x_refs, wide, strict=True):
                sum_ref[...] += jax.lax.dot_general(
                    x_ref[:, columns],
                    weights,
                    (((1,), (1,)), ((), ())),
                    precision=precision,
                    preferred_element_type=jnp.float32,
                )

        width = codes_ref.shape[-1] if format_ is None else format_.columns
        whole = width // PIECE
        if whole == 1:
            piece(0, PIECE)
        elif whole:

            @pl.loop(0, whole)
            def _(number: Any) -> None:
                piece(pl.multiple_of(number * PIECE, PIECE), PIECE)

        if width % PIECE:
            piece(whole * PIECE, width % PIECE)

        put_rows(out_ref, sum_ref, v, tile_ref, first, last, rows)


def put_rows(
    out_ref: Any, sum_ref: Any, v: Any, tile_ref: Any, first: Any, last: Any, rows: int
) -> None:
    """Writes the sums of rows first to last of visit v, and leaves what others of the tile did."""
    tile = tile_ref[v]
    row = tile * rows + jax.lax.broadcasted_iota(jnp.int32, sum_ref.shape, 0)
    own = (row >= first) & (row < last)
    result = sum_ref[...].astype(out_ref.dtype)
    fresh = (v == 0) | (tile_ref[jnp.maximum(v - 1, 0)] != tile)

    @pl.when(fresh)
    def _() -> None:
        out_ref[...] = jnp.where(own, result, jnp.zeros_like(result))

    @pl.when(jnp.logical_not(fresh))
    def _() -> None:
        out_ref[...] = jnp.where(own, result, out_ref[...])
