"""Products with packed, bfloat16, float16 or float32 weights, by the compiled kernels."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from ...config import ACTIVATION_TYPES, ACTIVATIONS
from ...errors import StokerError
from ...quantized import QuantArray, dequantize
from .library import ISAS, load, why_unavailable
from .packed import MAX_BLOCK, PackedArray

#: What the kernels multiply with as it is, and what products take.
Readable = jax.Array | PackedArray
Multiplicand = Readable | QuantArray
DENSE = (jnp.float32, jnp.bfloat16, jnp.float16)
_FLOAT_BYTES = 4
#: Types of scales in the order of `Type` in kernels.h.
_TYPES = ("float32", "bfloat16", "float16", "int8", "uint8")
#: What x may go through first, in the order of `Before` in matmul.h.
BEFORE = ("", "norm", "rows", *ACTIVATIONS)


def matmul(
    x: jax.Array,
    weight: Multiplicand,
    *,
    activations: str = "int8",
    isa: str = "best",
    threads: int = 0,
) -> jax.Array:
    """`x [T, C]` times the transpose of `weight [R, C]`, giving float32 `[T, R]`.

    See `products`, of which this is the case of one weight.
    """
    return products(x, (weight,), activations=activations, isa=isa, threads=threads)[0]


def products(
    x: jax.Array,
    weights: Sequence[Multiplicand],
    *,
    norm: tuple[jax.Array, float] | None = None,
    activations: str = "int8",
    isa: str = "best",
    threads: int = 0,
) -> tuple[jax.Array, ...]:
    """`x [T, C]` times the transpose of each weight `[R_i, C]`, giving float32 `[T, R_i]`.

    One foreign call: x is read and quantised once, and the threads meet once. Sums are float32. A
    row's bits depend on that row and the weight only: not on T, its neighbours or the threads.

    Args:
      x: float32, bfloat16 or float16; computed with as float32.
      weights: packed arrays, or dense ones of float32, bfloat16 or float16; any mixture. A
        `QuantArray` that was not packed is dequantised anew by every call: it works, slowly.
      norm: weight `[C]` and epsilon of an RMS norm that x goes through first, in float32.
      activations: "int8" quantises x for packed weights, a scale to each block of at most 32
        columns (as llama.cpp does); "float32" keeps x as it is. Dense weights always use float32.
      isa: one of `library.ISAS`.
      threads: most threads to use; 0 for all that XLA has.

    Raises:
      StokerError: the kernels are not available, or shapes or types do not fit.
    """
    if norm is None:
        return _call(x, None, "", 0.0, weights, activations, isa, threads)
    weight, eps = norm
    if weight.shape != x.shape[1:]:
        raise StokerError(f"norm of shape {list(weight.shape)} does not fit x {list(x.shape)}")
    return _call(x, weight, "norm", eps, weights, activations, isa, threads)


def gated_matmul(
    gate: jax.Array,
    up: jax.Array,
    weight: Multiplicand,
    *,
    activation: str = "silu",
    activations: str = "int8",
    isa: str = "best",
    threads: int = 0,
) -> jax.Array:
    """`gated(gate, up)`, both `[T, C]`, times `weight [R, C]` transposed: float32 `[T, R]`.

    `activation` is one of `models.config.ACTIVATIONS`, computed in float32 (see
    `elementwise.gated`); the rest as for `products`.
    """
    check_gate(gate, up, activation)
    return _call(gate, up, activation, 0.0, (weight,), activations, isa, threads)[0]


def _call(
    x: jax.Array,
    other: jax.Array | None,
    before: str,
    eps: float,
    weights: Sequence[Multiplicand],
    activations: str,
    isa: str,
    threads: int,
) -> tuple[jax.Array, ...]:
    """Checks, then the foreign call; `before` is one of `BEFORE`, what x goes through first."""
    isa_index = check_input(x, activations, isa)
    ready: list[Readable] = []
    for weight in weights:
        ready.append(dequantize(weight) if isinstance(weight, QuantArray) else weight)
        check_weight(ready[-1], x.shape[1:])

    T, C = x.shape
    exact = activations == "float32"
    wide = x.astype(jnp.float32)
    operands = [leaf for weight in ready for leaf in jax.tree.leaves(weight)]
    shapes = [jax.ShapeDtypeStruct((T, weight.shape[0]), jnp.float32) for weight in ready]
    scratch = scratch_bytes(ready, T, C, exact, bool(before))
    shapes.append(jax.ShapeDtypeStruct((scratch,), jnp.uint8))
    call = jax.ffi.ffi_call("stoker_matmul", shapes, vmap_method="sequential")
    *results, _ = call(
        wide,
        wide if other is None else other.astype(jnp.float32),
        *operands,
        weights=np.array([field for weight in ready for field in weight_fields(weight)], np.int64),
        before=np.int64(BEFORE.index(before)),
        eps=np.float32(eps),
        exact=exact,
        isa=np.int64(isa_index),
        threads=np.int64(threads),
    )
    return tuple(results)


def isa_number(isa: str) -> int:
    """The number of an instruction set in kernels.h; StokerError where this processor lacks it."""
    library = load()
    available = ("best", *(library.isas if library else ()))
    if isa not in available:
        raise StokerError(f"instruction set '{isa}' is not among {', '.join(available)}")
    return ISAS.index(isa)


def check_input(x: jax.Array, activations: str, isa: str) -> int:
    """The number of an instruction set; StokerError unless products can be had and take `x`."""
    if load() is None:
        raise StokerError(str(why_unavailable()))
    isa_index = isa_number(isa)
    if activations not in ACTIVATION_TYPES:
        raise StokerError(
            f"activations '{activations}' must be one of {', '.join(ACTIVATION_TYPES)}"
        )
    if x.ndim != 2 or x.dtype not in DENSE:
        raise StokerError(f"x is {x.dtype}{list(x.shape)}; a product needs a matrix of floats")
    return isa_index


def check_gate(gate: jax.Array, up: jax.Array, activation: str) -> None:
    """Raises StokerError unless `gate` and `up` fit each other and `activation` is known."""
    if activation not in ACTIVATIONS:
        raise StokerError(f"activation '{activation}' must be one of {', '.join(ACTIVATIONS)}")
    if gate.shape != up.shape:
        raise StokerError(f"gate {list(gate.shape)} and up {list(up.shape)} must have one shape")


def check_weight(weight: Readable, columns: tuple[int, ...], groups: tuple[int, ...] = ()) -> None:
    """Raises StokerError unless `weight [*groups, R, *columns]` is one that kernels can read."""
    *leading, _, last = weight.shape if weight.ndim > 1 else (0, 0)
    if (*leading, last) != (*groups, *columns):
        what = f"rows of {columns[0]} columns" + (f" in {groups[0]} groups" if groups else "")
        raise StokerError(f"weight of shape {list(weight.shape)} does not take {what}")
    if not isinstance(weight, PackedArray):
        if weight.dtype not in DENSE:
            raise StokerError(f"weight of type {weight.dtype} must be float32, bfloat16 or float16")
        return
    bits = weight.record.codes.count * 8 // weight.record.scale.count // weight.group
    if bits != weight.bits:
        raise StokerError(
            f"packed weight of shape {list(weight.shape)} has records of {bits} bits to a code, "
            f"not {weight.bits}; pack it with stoker.models.ops.cpu.pack"
        )
    beside = bits == 4 and weight.record.minimum.count and weight.zero_point
    if beside or weight.block > MAX_BLOCK:
        raise StokerError(
            f"packed weight of shape {list(weight.shape)} has blocks of {weight.block} columns and "
            f"zero point {weight.zero_point}; kernels take blocks up to {MAX_BLOCK}, and no zero "
            "point beside minima of 4-bit codes; pack it with stoker.models.ops.cpu.pack"
        )


def weight_fields(weight: Readable) -> tuple[int, ...]:
    """What the handler must know beyond shapes.

    Bits (0: dense), group, block, zero point; scales and factors of scales for each row of a
    record; the types, in the order of `Type` in kernels.h, of scales, minima, factors of scales
    and of minima, or -1; and the sixteen bytes of the table, in two numbers, or zeros.
    """
    if not isinstance(weight, PackedArray):
        return (0,) * 12
    record = weight.record
    factors = [part.count for part in (record.super_scale, record.super_minimum) if part.count]
    parts = (record.scale, record.minimum, record.super_scale, record.super_minimum)
    types = (_TYPES.index(part.dtype) if part.count else -1 for part in parts)
    sizes = (weight.bits, weight.group, weight.block, weight.zero_point)
    table = np.array(weight.table or (0,) * 16, np.uint8).view(np.int64)
    return (*sizes, record.scale.count, factors[0] if factors else 1, *types, *map(int, table))


def scratch_bytes(
    weights: Sequence[Readable], T: int, C: int, exact: bool, goes_through: bool
) -> int:
    """Room for x prepared once for each distinct block size and zero point; see matmul.cc.

    Where x `goes_through` a norm or a gate first, for what comes out too.
    """
    kinds = {(w.block, w.zero_point) for w in weights if isinstance(w, PackedArray)}
    per_kind = (
        (T * C * _FLOAT_BYTES if exact else T * C) + 3 * T * (C // block) * _FLOAT_BYTES + 4 * 64
        for block, _ in kinds
    )
    return sum(per_kind) + (_FLOAT_BYTES * T * C + 64 if goes_through else 0)
