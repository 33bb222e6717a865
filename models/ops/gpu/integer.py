"""Products of many rows with quantised weights, by the integer tensor cores."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from ...quantized import QuantArray
from ..rounded import block_of, check_readable, round_rows, zero_point_left
from ..visits import Visits, group_visits, one_group
from .common import EXACT, zero
from .matmul import why_unsupported

#: Rows and outputs of a program.
_ROWS, _OUTPUTS = 128, 64
#: Columns that an integer tensor core multiplies at once, which lie in as many bytes.
_LEAST = 32
#: Groups whose minima are added at once.
_SHIFTS = 16
#: Float32 within a few last bits, on tensor cores.
_NEARLY = jax.lax.DotAlgorithmPreset.TF32_TF32_F32_X3


def integer_matmul(
    x: jax.Array, weight: QuantArray, *, dtype: Any = jnp.float32, interpret: bool = False
) -> jax.Array:
    """`x [T, C]`, rounded to int8 by `round_rows`, times the transpose of `weight [R, C]`.

    Codes stay integers in registers, sums over a block of columns are int32 and exact, and those of
    all blocks float32: see `rounded`.

    Args:
      x: bfloat16 or float32.
      weight: what `matmul` takes, with integer codes and scales without factors.
      dtype: of the result `[T, R]`.
      interpret: run the kernel as plain JAX, on any platform.

    Raises:
      StokerError: for a format that the kernel does not read.
    """
    leading = jax.tree.map(lambda leaf: leaf[None], weight)
    return _product(x, leading, one_group(x.shape[0], _ROWS), dtype, interpret)


def integer_grouped_matmul(
    x: jax.Array,
    weight: QuantArray,
    sizes: jax.Array,
    *,
    dtype: Any = jnp.float32,
    interpret: bool = False,
) -> jax.Array:
    """Rows `x [T, C]`, sorted by group, times the transpose of their group's matrix `[E, R, C]`.

    As of `grouped_matmul`, and computed as by `integer_matmul`.
    """
    return _product(x, weight, group_visits(sizes, x.shape[0], _ROWS), dtype, interpret)


def _product(
    x: jax.Array, weight: QuantArray, visits: Visits, dtype: Any, interpret: bool
) -> jax.Array:
    """Rows of x by the matrices `weight [E, R, C]` that `visits` name."""
    reason = why_unsupported(weight)
    if block_of(weight) * weight.bits // 8 < _LEAST:
        reason = f"groups of {weight.group} codes of {weight.bits} bits are too short"
    check_readable(weight, reason)
    T, R = x.shape[0], weight.shape[-2]
    rounded = round_rows(x, weight)
    factors = [part for part in (rounded.scale, rounded.sums) if part is not None]
    leaves = [leaf for leaf in (weight.codes, weight.scale, weight.minimum) if leaf is not None]

    def whole(array: jax.Array) -> pl.BlockSpec:
        return pl.BlockSpec(array.shape, lambda v, r: (0,) * array.ndim)

    def outputs(leaf: jax.Array) -> pl.BlockSpec:
        E, _, width = leaf.shape
        return pl.BlockSpec((E, _OUTPUTS, width), lambda v, r: (0, r, 0))

    scalars = (visits.group, visits.tile, visits.first, visits.last)
    operands = (*scalars, rounded.codes, *factors)
    return pl.pallas_call(
        functools.partial(
            _kernel,
            bits=weight.bits,
            block=block_of(weight),
            group=weight.group,
            zero_point=weight.zero_point,
            zero_point_left=zero_point_left(weight),
            n_factors=len(factors),
            n_outputs=R,
            interpret=interpret,
        ),
        out_shape=jax.ShapeDtypeStruct((T, R), dtype),
        grid=(visits.tile.shape[0], -(-R // _OUTPUTS)),
        in_specs=[*map(whole, operands), *map(outputs, leaves)],
        out_specs=pl.BlockSpec((T, _OUTPUTS), lambda v, r: (0, r)),
        compiler_params=plgpu.CompilerParams(num_warps=8, num_stages=3),
        interpret=interpret,
        name="stoker_integer_matmul" if len(weight.codes) == 1 else "stoker_integer_grouped_matmul",
    )(*operands, *leaves)


def _kernel(
    group_ref: Any,
    tile_ref: Any,
    first_ref: Any,
    last_ref: Any,
    x_ref: Any,
    *refs: Any,
    bits: int,
    block: int,
    group: int,
    zero_point: int,
    zero_point_left: int,
    n_factors: int,
    n_outputs: int,
    interpret: bool,
) -> None:
    """A block of outputs for the rows of one visit."""
    (x_scale_ref, *x_sum_ref), leaves = refs[:n_factors], refs[n_factors:-1]
    codes_ref, scale_ref, *minimum_ref = leaves
    out_ref = refs[-1]
    v = pl.program_id(0)
    matrix, first, last = group_ref[v], first_ref[v], last_ref[v]
    rows = pl.ds(tile_ref[v] * _ROWS, _ROWS)
    row = tile_ref[v] * _ROWS + jnp.arange(_ROWS)
    own = (row >= first) & (row < last)
    output = pl.program_id(1) * _OUTPUTS + jnp.arange(_OUTPUTS) < n_outputs
    width = block * bits // 8
    # A scale to a whole row waits for the row's sum.
    waits = len(x_scale_ref) * block == group
    none = jnp.int32(0)

    def scales(number: Any) -> jax.Array:
        values = plgpu.load(scale_ref.at[matrix, :, number], mask=output, other=zero(scale_ref))
        return values.astype(jnp.float32)[None, :]

    def body(number: Any, total: jax.Array) -> jax.Array:
        codes = plgpu.load(
            codes_ref.at[matrix, :, pl.ds(number * width, width)], mask=output[:, None], other=0
        )
        sums = jnp.zeros((_ROWS, _OUTPUTS), jnp.int32)
        for half, part in enumerate(_integers(codes, bits, zero_point, interpret)):
            columns = pl.ds(half * width, width)
            x = plgpu.load(x_ref.at[number, rows, columns], mask=own[:, None], other=0)
            sums += jax.lax.dot_general(
                x, part, (((1,), (1,)), ((), ())), preferred_element_type=jnp.int32
            )
        factor = plgpu.load(x_scale_ref.at[number, rows], mask=own, other=0.0)[:, None]
        values = sums.astype(jnp.float32) * factor
        if waits:
            return total + values
        return _multiply_add(values, scales(number * block // group), total, interpret)

    total = jnp.zeros((_ROWS, _OUTPUTS), jnp.float32)
    n_blocks = jnp.where(first < last, len(x_scale_ref), none)
    total = jax.lax.fori_loop(none, n_blocks, body, total)
    if waits:
        total *= scales(none)

    def shift(number: Any, total: jax.Array) -> jax.Array:
        """Adds what minima and zero points of `_SHIFTS` groups come to."""
        groups = pl.ds(number * _SHIFTS, _SHIFTS)
        there = number * _SHIFTS + jnp.arange(_SHIFTS) < len(x_sum_ref[0])
        of_outputs = output[:, None] & there[None, :]
        least = jnp.zeros((_OUTPUTS, _SHIFTS), jnp.float32)
        for ref, share in ((scale_ref, -zero_point_left), *((ref, 1) for ref in minimum_ref)):
            if share:
                part = plgpu.load(ref.at[matrix, :, groups], mask=of_outputs, other=zero(ref))
                least += share * part.astype(jnp.float32)
        of_rows = there[:, None] & own[None, :]
        x_sums = plgpu.load(x_sum_ref[0].at[groups, rows], mask=of_rows, other=0.0)
        return total + jax.lax.dot_general(
            x_sums,
            least,
            (((0,), (1,)), ((), ())),
            precision=EXACT if interpret else _NEARLY,
            preferred_element_type=jnp.float32,
        )

    if x_sum_ref:
        turns = jnp.where(first < last, pl.cdiv(len(x_sum_ref[0]), _SHIFTS), none)
        total = jax.lax.fori_loop(none, turns, shift, total)
    plgpu.store(
        out_ref.at[rows, :], total.astype(out_ref.dtype), mask=own[:, None] & output[None, :]
    )


def _multiply_add(a: jax.Array, b: jax.Array, c: jax.Array, interpret: bool) -> jax.Array:
    """`a * b + c`, which Triton would make two instructions."""
    b = jnp.broadcast_to(b, a.shape)
    if interpret:
        return a * b + c
    asm = "fma.rn.f32 $0, $1, $2, $3;"
    out = jax.ShapeDtypeStruct(a.shape, jnp.float32)
    (result,) = plgpu.elementwise_inline_asm(
        asm, args=[a, b, c], constraints="=f,f,f,f", pack=1, result_shape_dtypes=[out]
    )
    return result


def _integers(codes: jax.Array, bits: int, zero_point: int, interpret: bool) -> Sequence[jax.Array]:
    """Stored bytes as int8 codes; those of 4 bits less the zero point, low and high halves."""
    if bits == 8:
        return [codes]
    if interpret:
        return [half.astype(jnp.int8) - zero_point for half in (codes & 15, codes >> 4)]
    # Four bytes of a register at once, which the compiler does not find. Their highest bits, set
    # meanwhile, keep what is subtracted from one byte out of the next.
    mask = "and.b32 $0, $0, 0x0f0f0f0f;"
    if zero_point:
        mask += "or.b32 $0, $0, 0x80808080;"
        mask += f"sub.u32 $0, $0, {zero_point * 0x01010101}; xor.b32 $0, $0, 0x80808080;"
    half = jax.ShapeDtypeStruct(codes.shape, jnp.int8)
    return [
        plgpu.elementwise_inline_asm(
            f"shr.u32 $0, $1, {shift}; {mask}",
            args=[codes],
            constraints="=r,r",
            pack=4,
            result_shape_dtypes=[half],
        )[0]
        for shift in (0, 4)
    ]
