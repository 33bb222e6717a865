"""Products with weights that are read as they are stored, and made wide in registers."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from ...errors import StokerError
from ...quantized import QuantArray, Weight
from ..visits import Visits, group_visits, halves, one_group
from .common import EXACT, zero

#: Rows of x, outputs and bytes of a row of codes that a program multiplies at once.
_ROWS, _OUTPUTS, _BYTES = 64, 64, 64
#: Programs that keep a GPU busy; see `attention.PROGRAMS`.
_PROGRAMS = 264
_CODES = ("int8", "uint8", "float8_e4m3fn", "float8_e5m2")
_SCALES = ("float32", "float16", "bfloat16", "int8", "uint8", "float8_e4m3fn", "float8_e8m0fnu")


def why_unsupported(weight: Weight) -> str | None:
    """Why the kernels cannot read `weight [..., R, C]`; None if they can."""
    C = weight.shape[-1]
    if not isinstance(weight, QuantArray):
        return None if C % 16 == 0 else f"rows of {C} columns are no multiple of 16"
    width = weight.codes.shape[-1]
    span = weight.group * weight.bits // 8
    if width % 16:
        return f"rows of {width} bytes are no multiple of 16"
    if weight.scale.shape[-1] != 1 and (span < 1 or span & (span - 1)):
        return f"groups of {weight.group} codes of {weight.bits} bits are no power of two"
    if str(weight.codes.dtype) not in _CODES:
        return f"codes of {weight.codes.dtype} are not widened"
    if weight.codes.size >= 2**31:
        return f"{weight.codes.size:,} bytes of codes are more than 32-bit offsets reach"
    groups = weight.scale.shape[-1]
    for part in (weight.scale, weight.minimum, weight.super_scale, weight.super_minimum):
        if part is not None and str(part.dtype) not in _SCALES:
            return f"scales of {part.dtype} are not read"
        share = 1 if part is None else _share(groups, part)
        if share & (share - 1):
            return f"{share} groups to a factor are no power of two"
    return None


@dataclasses.dataclass(frozen=True)
class _Format:
    """How codes are read; see `QuantArray`. `span` and `width` count bytes of a row.

    `shares` are groups to a factor of scales and of minima, or 0; `minimum` tells whether there
    are minima, `exponents` whether scales are powers of two. A dense array has 0 bits.
    """

    bits: int
    width: int
    span: int = 0
    zero_point: int = 0
    levels: tuple[float, ...] = ()
    minimum: bool = False
    shares: tuple[int, int] = (0, 0)
    exponents: bool = False


def matmul(
    x: jax.Array, weight: QuantArray, *, dtype: Any = jnp.float32, interpret: bool = False
) -> jax.Array:
    """`x [T, C]` times the transpose of a quantised `weight [R, C]`: `[T, R]` of `dtype`.

    One kernel reads codes and scales and multiplies: XLA would write the dense weights to memory
    first, since it takes a scale to each group into no product. Weights are rounded to x's type;
    sums are float32. Where rows are few, a row of codes is split between programs, and XLA adds
    their sums.

    Args:
      x: bfloat16 or float32.
      weight: what `why_unsupported` has nothing against.
      dtype: of the result.
      interpret: run the kernel as plain JAX, on any platform.

    Raises:
      StokerError: for a format that the kernel does not read.
    """
    rows = _row_block(x.shape[0])
    leading = jax.tree.map(lambda leaf: leaf[None], weight)
    return _product(x, leading, one_group(x.shape[0], rows), rows, dtype, interpret)


def grouped_matmul(
    x: jax.Array,
    weight: Weight,
    sizes: jax.Array,
    *,
    dtype: Any = jnp.float32,
    interpret: bool = False,
) -> jax.Array:
    """Rows `x [T, C]`, sorted by group, times the transpose of their group's matrix.

    The matrices of groups without rows are not read.

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
    rows = _row_block(-(-T // weight.shape[0]))
    return _product(x, weight, group_visits(sizes, T, rows), rows, dtype, interpret)


def _row_block(rows: int) -> int:
    """Rows of a program: a power of two from 16 on, which tensor cores take."""
    return min(max(pl.next_power_of_2(rows), 16), _ROWS)


def _product(
    x: jax.Array, weight: Weight, visits: Visits, rows: int, dtype: Any, interpret: bool
) -> jax.Array:
    """Rows of x by the matrices `weight [E, R, C]` that `visits` name."""
    reason = why_unsupported(weight)
    if reason:
        raise StokerError(
            f"the GPU kernel cannot read a weight of shape {list(weight.shape)}: {reason}; use "
            "kernels='xla'"
        )
    T, R = x.shape[0], weight.shape[-2]
    format_, leaves = _format_of(weight)
    operands = halves(x, format_.span) if format_.bits == 4 else [x]
    V, n_out = visits.tile.shape[0], -(-R // _OUTPUTS)
    # The widest step that divides a row of codes; then as many shares of the steps as keep busy.
    step = next(size for size in (_BYTES, 32, 16) if format_.width % size == 0)
    steps = format_.width // step
    splits = max(1, min(-(-_PROGRAMS // (V * n_out)), steps // 4))
    share = -(-steps // splits)
    splits = -(-steps // share)

    def whole(array: jax.Array) -> pl.BlockSpec:
        return pl.BlockSpec(array.shape, lambda v, r, s: (0,) * array.ndim)

    def outputs(leaf: jax.Array) -> pl.BlockSpec:
        E, _, width = leaf.shape
        return pl.BlockSpec((E, _OUTPUTS, width), lambda v, r, s: (0, r, 0))

    scalars = (visits.group, visits.tile, visits.first, visits.last)
    sums = pl.pallas_call(
        functools.partial(
            _kernel,
            format_=format_,
            n_x=len(operands),
            n_outputs=R,
            rows=rows,
            step=step,
            steps=steps,
            share=share,
        ),
        out_shape=jax.ShapeDtypeStruct((splits, T, R), jnp.float32 if splits > 1 else dtype),
        grid=(V, n_out, splits),
        in_specs=[*map(whole, (*scalars, *operands)), *map(outputs, leaves)],
        out_specs=pl.BlockSpec((None, T, _OUTPUTS), lambda v, r, s: (s, 0, r)),
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=3),
        interpret=interpret,
        name="stoker_matmul" if weight.shape[0] == 1 else "stoker_grouped_matmul",
    )(*scalars, *operands, *leaves)
    return (sums[0] if splits == 1 else sums.sum(axis=0)).astype(dtype)


def _format_of(weight: Weight) -> tuple[_Format, list[jax.Array]]:
    if not isinstance(weight, QuantArray):
        return _Format(bits=0, width=weight.shape[-1]), [weight]
    leaves = [weight.codes, weight.scale, weight.minimum, weight.super_scale, weight.super_minimum]
    groups = weight.scale.shape[-1]
    shares = tuple(0 if part is None else _share(groups, part) for part in leaves[3:])
    return _Format(
        bits=weight.bits,
        width=weight.codes.shape[-1],
        span=weight.group * weight.bits // 8,
        zero_point=weight.zero_point,
        levels=tuple(getattr(weight, "levels", ())),
        minimum=weight.minimum is not None,
        shares=(shares[0], shares[1]),
        exponents=weight.scale.dtype == jnp.float8_e8m0fnu,
    ), [_loadable(leaf) for leaf in leaves if leaf is not None]


def _share(groups: int, factor: jax.Array) -> int:
    """Groups to a factor; where a row has one only, any number that is enough."""
    return pl.next_power_of_2(groups) if factor.shape[-1] == 1 else groups // factor.shape[-1]


def _loadable(leaf: jax.Array) -> jax.Array:
    """Exponents as bytes, since Triton has no type of them alone."""
    if leaf.dtype != jnp.float8_e8m0fnu:
        return leaf
    return jax.lax.bitcast_convert_type(leaf, jnp.uint8)


def _kernel(
    group_ref: Any,
    tile_ref: Any,
    first_ref: Any,
    last_ref: Any,
    *refs: Any,
    format_: _Format,
    n_x: int,
    n_outputs: int,
    rows: int,
    step: int,
    steps: int,
    share: int,
) -> None:
    """A block of outputs for the rows of one visit, from a share of the columns."""
    x_refs, codes_ref, *factor_refs = refs[:n_x], *refs[n_x:-1]
    out_ref = refs[-1]
    v = pl.program_id(0)
    group, first, last = group_ref[v], first_ref[v], last_ref[v]
    begin = pl.program_id(2) * share
    end = jnp.where(first < last, jnp.minimum(begin + share, steps), begin)
    row = tile_ref[v] * rows + jnp.arange(rows)
    own = (row >= first) & (row < last)
    output = pl.program_id(1) * _OUTPUTS + jnp.arange(_OUTPUTS) < n_outputs
    work = x_refs[0].dtype
    precision = EXACT if work == jnp.float32 else None

    def body(index: Any, total: jax.Array) -> jax.Array:
        columns = pl.ds(index * step, step)
        codes = plgpu.load(
            codes_ref.at[group, :, columns], mask=output[:, None], other=zero(codes_ref)
        )
        factors = _factors(factor_refs, group, output, index * step, step, format_)
        for x_ref, weights in zip(x_refs, _widen(codes, factors, format_), strict=True):
            part = plgpu.load(
                x_ref.at[pl.ds(tile_ref[v] * rows, rows), columns], mask=own[:, None], other=0.0
            )
            total = total + jax.lax.dot_general(
                part,
                weights.astype(work),
                (((1,), (1,)), ((), ())),
                precision=precision,
                preferred_element_type=jnp.float32,
            )
        return total

    total = jax.lax.fori_loop(begin, end, body, jnp.zeros((rows, _OUTPUTS), jnp.float32))
    plgpu.store(
        out_ref.at[pl.ds(tile_ref[v] * rows, rows), :],
        total.astype(out_ref.dtype),
        mask=own[:, None] & output[None, :],
    )


def _factors(
    refs: list[Any], group: Any, output: jax.Array, start: Any, step: int, format_: _Format
) -> list[jax.Array]:
    """Scales, and minima, of the groups in some bytes of codes: float32 `[outputs, groups]`."""
    if not format_.bits:
        return []
    there = iter(refs)
    parts = [next(there) for _ in range(2 if format_.minimum else 1)]
    group_number = start // format_.span
    count = max(step // format_.span, 1)

    def load(ref: Any, first: Any, width: int) -> jax.Array:
        values = plgpu.load(
            ref.at[group, :, pl.ds(first, width)],
            mask=jnp.broadcast_to(output[:, None], (output.shape[0], width)),
            other=zero(ref),
        )
        if format_.exponents:
            return jax.lax.bitcast_convert_type(values.astype(jnp.int32) << 23, jnp.float32)
        return values.astype(jnp.float32)

    results = []
    for part, share in zip(parts, format_.shares, strict=False):
        values = load(part, group_number, count)
        if share:
            factors = load(next(there), group_number // share, max(count // share, 1))
            values = values * _spread(factors, count)
        results.append(values)
    return results


def _spread(values: jax.Array, width: int) -> jax.Array:
    """`[R, width]` of `values [R, n]`, each of which stands width / n times."""
    rows, count = values.shape
    wide = jnp.broadcast_to(values[:, :, None], (rows, count, width // count))
    return wide.reshape(rows, width)


def _widen(codes: jax.Array, factors: list[jax.Array], format_: _Format) -> list[jax.Array]:
    """Weights of some bytes, `[outputs, bytes]`: of low and high halves, where codes are 4-bit."""
    if not format_.bits:
        return [codes]
    if format_.bits == 8:
        parts = [codes.astype(jnp.float32)]
    else:
        wide = codes.astype(jnp.int32)
        parts = [wide & 15, (wide >> 4) & 15]
        parts = [_level(part, format_.levels) for part in parts]
    factors = [_spread(factor, codes.shape[1]) for factor in factors]
    results = []
    for part in parts:
        values = (part - format_.zero_point if format_.zero_point else part) * factors[0]
        results.append(values + factors[1] if len(factors) > 1 else values)
    return results


def _level(codes: jax.Array, levels: tuple[float, ...]) -> jax.Array:
    """What 4-bit codes stand for, float32."""
    if not levels:
        return codes.astype(jnp.float32)
    values = jnp.zeros(codes.shape, jnp.float32)
    for number, level in enumerate(levels):
        values = jnp.where(codes == number, level, values)
    return values
