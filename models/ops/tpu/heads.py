"""Products of each head with a matrix of its own, which is read as it is stored."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ...errors import StokerError
from ...quantized import QuantArray
from ..visits import halves
from .common import EXACT, VMEM_BYTES
from .widen import PIECE, Format, format_of, read_scales, scratch_width, why_unsupported, widen

#: Heads whose matrices are on their way at once: those of one alone are soon read.
_HEADS = 8
#: Most rows of a head that are multiplied at once.
_ROWS = 512


def head_matmul(
    x: jax.Array, weight: QuantArray, *, dtype: Any = jnp.float32, interpret: Any = False
) -> jax.Array:
    """`x [T, N, C]` times the transpose of each head's matrix of a quantised `weight [N, R, C]`.

    As `matmul`, but that each matrix is read and widened once, however many rows there are.

    Args:
      x: bfloat16 or float32.
      weight: what `why_unsupported` has nothing against.
      dtype: of the result.
      interpret: run the kernel as plain JAX, on any platform.

    Returns:
      `[T, N, R]` of `dtype`.

    Raises:
      StokerError: for a format that the kernel does not read.
    """
    reason = why_unsupported(weight)
    if reason:
        raise StokerError(
            f"the TPU kernel cannot read heads' matrices of shape {list(weight.shape)}: {reason}; "
            "use kernels='xla'"
        )
    (T, N, C), R = x.shape, weight.shape[1]
    format_, leaves = format_of(weight)
    by_head = x.swapaxes(0, 1)
    operands = [by_head]
    if format_.bits == 4:
        flat = by_head.reshape(N * T, C)
        operands = [half.reshape(N, T, -1) for half in halves(flat, format_.span)]
    heads, rows = min(N, _HEADS), min(T, _ROWS)
    n_scales = 2 if format_.kinds[1] else 1

    def of_rows(width: int) -> pl.BlockSpec:
        return pl.BlockSpec((heads, rows, width), lambda h, t: (h, t, 0))

    out = pl.pallas_call(
        functools.partial(_kernel, format_=format_, n_x=len(operands)),
        out_shape=jax.ShapeDtypeStruct((N, T, R), dtype),
        grid=(-(-N // heads), -(-T // rows)),
        in_specs=[
            *(of_rows(part.shape[2]) for part in operands),
            *(pl.BlockSpec((heads, *leaf.shape[1:]), lambda h, t: (h, 0, 0)) for leaf in leaves),
        ],
        out_specs=of_rows(R),
        scratch_shapes=[
            *[pltpu.VMEM((heads, R, format_.columns), x.dtype)] * len(operands),
            *[pltpu.VMEM((R, scratch_width(format_)), jnp.float32)] * n_scales,
        ],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=VMEM_BYTES
        ),
        interpret=interpret,
        name="stoker_head_matmul",
    )(*operands, *leaves)
    return out.swapaxes(0, 1)


def _kernel(*refs: Any, format_: Format, n_x: int) -> None:
    """Some heads' rows; the first of them find the heads' matrices still to be widened."""
    n_factors = sum(map(bool, format_.kinds))
    x_refs, codes_ref = refs[:n_x], refs[n_x]
    factor_refs = refs[n_x + 1 : n_x + 1 + n_factors]
    out_ref, *scratch = refs[n_x + 1 + n_factors :]
    wide_refs, scale_refs = scratch[:n_x], scratch[n_x:]
    heads = out_ref.shape[0]
    work = x_refs[0].dtype

    @pl.when(pl.program_id(1) == 0)
    def _() -> None:
        @pl.loop(0, heads)
        def _(h: Any) -> None:
            read_scales([ref.at[pl.ds(h, 1)] for ref in factor_refs], format_, scale_refs)
            for start in range(0, format_.columns, PIECE):
                columns = pl.ds(start, min(PIECE, format_.columns - start))
                parts = widen(codes_ref[h, :, columns], start, format_, scale_refs, work)
                for ref, part in zip(wide_refs, parts, strict=True):
                    ref[h, :, columns] = part

    @pl.loop(0, heads)
    def _(h: Any) -> None:
        products = [
            jax.lax.dot_general(
                x_ref[h],
                wide_ref[h],
                (((1,), (1,)), ((), ())),
                precision=EXACT if work == jnp.float32 else None,
                preferred_element_type=jnp.float32,
            )
            for x_ref, wide_ref in zip(x_refs, wide_refs, strict=True)
        ]
        out_ref[h] = sum(products[1:], products[0]).astype(out_ref.dtype)
