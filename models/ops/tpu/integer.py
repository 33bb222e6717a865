"""Products of many rows with quantised weights, by the matrix units' integers."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ...quantized import QuantArray
from ..rounded import BLOCK, block_of, check_readable, round_rows, zero_point_left
from ..visits import Visits, group_visits, one_group
from .common import LANES, VMEM_BYTES
from .matmul import output_block, put_rows, row_block
from .widen import Format, format_of, pick, read_turned, register, why_unsupported

#: Blocks whose products are added to the sums at once: every time, these are read and written.
_STEP = 4


def integer_matmul(
    x: jax.Array, weight: QuantArray, *, dtype: Any = jnp.float32, interpret: Any = False
) -> jax.Array:
    """`x [T, C]`, rounded to int8 by `round_rows`, times the transpose of `weight [R, C]`.

    Sums over a block of columns are int32 and exact, and those of all blocks float32: see
    `rounded`.

    Args:
      x: bfloat16 or float32.
      weight: what `matmul` takes, with integer codes, groups of whole blocks of `rounded.BLOCK`
        columns, and scales without factors.
      dtype: of the result `[T, R]`.
      interpret: run the kernel as plain JAX, on any platform.

    Raises:
      StokerError: for a format that the kernel does not read.
    """
    leading = jax.tree.map(lambda leaf: leaf[None], weight)
    rows = _row_block(x)
    return _product(x, leading, one_group(x.shape[0], rows), rows, dtype, interpret)


def integer_grouped_matmul(
    x: jax.Array,
    weight: QuantArray,
    sizes: jax.Array,
    *,
    dtype: Any = jnp.float32,
    interpret: Any = False,
) -> jax.Array:
    """Rows `x [T, C]`, sorted by group, times the transpose of their group's matrix `[E, R, C]`.

    As of `grouped_matmul`, and computed as by `integer_matmul`.
    """
    rows = _row_block(x)
    return _product(x, weight, group_visits(sizes, x.shape[0], rows), rows, dtype, interpret)


def _row_block(x: jax.Array) -> int:
    """Rows of `round_rows(x)` that are multiplied at once."""
    T, C = x.shape
    return row_block(pl.cdiv(T, 8) * 8, C, jnp.int8)


def _product(
    x: jax.Array, weight: QuantArray, visits: Visits, rows: int, dtype: Any, interpret: Any
) -> jax.Array:
    """Rows of x by the matrices `weight [E, R, C]` that `visits` name."""
    reason = why_unsupported(weight)
    if block_of(weight) < BLOCK:
        reason = f"groups of {weight.group} columns are no whole blocks of {BLOCK}"
    check_readable(weight, reason)
    T, R = x.shape[0], weight.shape[-2]
    rounded = round_rows(x, weight)
    format_, leaves = format_of(weight)
    block = output_block(R, x.shape[1] // 2)
    leaves[0] = jnp.pad(leaves[0], ((0, 0), (0, 0), (0, -leaves[0].shape[-1] % LANES)))
    scale = jnp.pad(rounded.scale, ((0, -len(rounded.scale) % LANES), (0, 0))).T
    operands = [scale]
    scratch = [pltpu.VMEM((format_.groups, block), jnp.float32)]
    shifted = rounded.sums is not None
    if rounded.sums is not None:
        # XLA would drop a conversion to bfloat16 and back.
        high = jax.lax.reduce_precision(rounded.sums.T, exponent_bits=8, mantissa_bits=7)
        low = rounded.sums.T - high
        operands.append(jnp.concatenate([high, high, low], axis=1).astype(jnp.bfloat16))
        scratch.append(pltpu.VMEM((3 * format_.groups, block), jnp.float32))

    def at_tile(r: Any, v: Any, group: Any, tile: Any, *_: Any) -> tuple[Any, ...]:
        return tile[v], 0

    def along_tile(r: Any, v: Any, group: Any, tile: Any, *_: Any) -> tuple[Any, ...]:
        return 0, tile[v], 0

    def at_group(r: Any, v: Any, group: Any, *_: Any) -> tuple[Any, ...]:
        return group[v], r, 0

    def across_group(r: Any, v: Any, group: Any, *_: Any) -> tuple[Any, ...]:
        return group[v], 0, r

    return pl.pallas_call(
        functools.partial(
            _kernel,
            format_=format_,
            zero_point_left=zero_point_left(weight),
            shifted=shifted,
            rows=rows,
        ),
        out_shape=jax.ShapeDtypeStruct((T, R), dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=4,
            grid=(-(-R // block), visits.tile.shape[0]),
            in_specs=[
                pl.BlockSpec((len(rounded.codes), rows, BLOCK), along_tile),
                *(pl.BlockSpec((rows, part.shape[1]), at_tile) for part in operands),
                *(
                    pl.BlockSpec((1, leaf.shape[-2], block), across_group)
                    if turn
                    else pl.BlockSpec((1, block, leaf.shape[-1]), at_group)
                    for leaf, turn in zip(leaves, (False, *format_.turned), strict=True)
                ),
            ],
            out_specs=pl.BlockSpec((rows, block), lambda r, v, group, tile, *_: (tile[v], r)),
            scratch_shapes=[pltpu.VMEM((rows, block), jnp.float32), *scratch],
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=VMEM_BYTES
        ),
        interpret=interpret,
        name="stoker_integer_matmul" if len(weight.codes) == 1 else "stoker_integer_grouped_matmul",
    )(visits.group, visits.tile, visits.first, visits.last, rounded.codes, *operands, *leaves)


def _kernel(
    group_ref: Any,
    tile_ref: Any,
    first_ref: Any,
    last_ref: Any,
    x_ref: Any,
    x_scale_ref: Any,
    *refs: Any,
    format_: Format,
    zero_point_left: int,
    shifted: bool,
    rows: int,
) -> None:
    """A block of outputs for the rows of one visit."""
    x_sums_ref = refs[0] if shifted else None
    n_factors = sum(map(bool, format_.kinds))
    codes_ref, *factor_refs = refs[int(shifted) :][: 1 + n_factors]
    out_ref, sum_ref, scale_ref, *least_ref = refs[int(shifted) + 1 + n_factors :]
    v = pl.program_id(1)
    n_blocks = len(x_ref)
    share = n_blocks // format_.groups
    # A scale to a whole row waits for the row's sum.
    waits = format_.groups == 1

    @pl.when(first_ref[v] < last_ref[v])
    def _() -> None:
        scale, *minimum = read_turned(factor_refs, format_)
        scale_ref[...] = scale
        sum_ref[...] = jnp.zeros(sum_ref.shape, jnp.float32)

        def add(first: Any, count: int) -> None:
            """Adds the products of `count` blocks from `first` on."""
            codes = _codes(codes_ref, first, count, format_)
            blocks = [first + number for number in range(count)]
            factors = [_column(x_scale_ref, block) for block in blocks]
            scales = [scale_ref[pl.ds(block // share, 1), :] for block in blocks]
            for start in range(0, out_ref.shape[1], LANES):
                outputs = slice(start, min(start + LANES, out_ref.shape[1]))
                total = sum_ref[:, outputs]
                for number, block in enumerate(blocks):
                    sums = jax.lax.dot_general(
                        x_ref[block],
                        codes[number][outputs],
                        (((1,), (1,)), ((), ())),
                        preferred_element_type=jnp.int32,
                    )
                    values = sums.astype(jnp.float32) * factors[number][:, : total.shape[1]]
                    if not waits:
                        values *= scales[number][:, outputs]
                    total += values
                sum_ref[:, outputs] = total

        @pl.loop(0, n_blocks // _STEP)
        def _(number: Any) -> None:
            add(number * _STEP, _STEP)

        if n_blocks % _STEP:
            add(n_blocks // _STEP * _STEP, n_blocks % _STEP)
        if waits:
            sum_ref[...] *= scale
        if x_sums_ref is not None:
            least = minimum[0] if minimum else jnp.zeros_like(scale)
            if zero_point_left:
                least -= zero_point_left * scale
            high = least.astype(jnp.bfloat16).astype(jnp.float32)
            low = least - high
            for number, part in enumerate((high, low, high)):
                rows_of = slice(number * format_.groups, (number + 1) * format_.groups)
                least_ref[0][rows_of, :] = part
            sum_ref[...] += jnp.dot(
                x_sums_ref[...],
                least_ref[0][...].astype(jnp.bfloat16),
                preferred_element_type=jnp.float32,
            )
        put_rows(out_ref, sum_ref, v, tile_ref, first_ref[v], last_ref[v], rows)


def _column(ref: Any, number: Any) -> jax.Array:
    """Column `number` of a float32 `[T, ...]` of whole registers, in all lanes: `[T, 128]`."""
    source = ref[:, register(number // LANES * LANES)]
    return pick(source, jnp.full(source.shape, number % LANES, jnp.int32))


def _codes(ref: Any, first: Any, count: int, format_: Format) -> list[jax.Array]:
    """The int8 codes of `count` blocks from `first` on, a multiple of `_STEP`, `[outputs, BLOCK]`.

    A register holds one block of 8-bit codes, or two of 4-bit ones.
    """
    width = BLOCK * format_.bits // 8
    blocks: list[jax.Array] = []
    while len(blocks) < count:
        stored = ref[0, :, register(first * width + len(blocks) * width)]
        blocks += [stored] if format_.bits == 8 else _halves(stored, format_.zero_point)
    return blocks[:count]


def _halves(stored: jax.Array, zero_point: int) -> list[jax.Array]:
    """Two blocks of 4-bit codes less the zero point, each with its low halves of bytes first."""
    # Four bytes of a register at once.
    words = pltpu.bitcast(stored, jnp.int32)
    low, high = (_shifted(half & 0x0F0F0F0F, zero_point) for half in (words, words >> 4))
    first = jax.lax.broadcasted_iota(jnp.int32, words.shape, 1) < LANES // 2
    parts = (
        jnp.where(first, low, pltpu.roll(high, LANES // 2, 1)),
        jnp.where(first, pltpu.roll(low, LANES // 2, 1), high),
    )
    return [pltpu.bitcast(part, jnp.int8) for part in parts]


def _shifted(words: jax.Array, zero_point: int) -> jax.Array:
    """Bytes of less than 16 in words, less the zero point."""
    if not zero_point:
        return words
    # The highest bits, set meanwhile, keep what is subtracted from one byte out of the next.
    highest = jnp.int32(-0x7F7F7F80)
    return ((words | highest) - zero_point * 0x01010101) ^ highest
