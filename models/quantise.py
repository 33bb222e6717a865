"""Dense matrices to quantised ones: groups of columns, each with the scale that errs least.

With `minimum`, a group x becomes codes q in 0..15 and the pair (s, m) that minimises
sum(w (x - s q - m)^2); without, codes in -127..127 or -8..7 and the s that minimises
sum(w (x - s q)^2). For given codes these are least-squares problems with closed solutions::

    s = (<1> <x q> - <x> <q>) / (<1> <q q> - <q>^2),  m = (<x> - s <q>) / <1>
    s = <x q> / <q q>

where <> sums over the group, each column times its w, and for a given pair the best codes are x
rounded to its grid. The weight of a column is |x| plus a quarter of its mean over the group: large
weights meet large activations more often than not, and with all columns alike the search cuts them
off, which costs a model more than it gains. The search
starts from a few grids that stretch over more or less of the group's range, takes the codes of
each, solves for the pair, and keeps the pair that errs least; codes are then rounded once more to
the grid of that pair as it is stored. Without search, the grid spans the range exactly.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .errors import StokerError
from .host_arrays import Empty, aligned_empty
from .parameters import Parameter
from .quantized import QuantArray

#: Widths of a code by the name of a format.
FORMATS = {"int8": 8, "int4": 4}
#: Steps that the range of a group is cut into, candidates of the search; without it, the first.
#: Signed ones are of the range on that side of zero where the largest magnitude is (negative: on
#: the other side, where there is one code fewer).
_STEPS = {
    (8, False): (127.0, 119.0, 121.0, 123.0, 125.0, 126.0),
    (4, False): (-8.0, -9.0, -8.5, -7.5, -7.0, -6.5, 6.0, 6.5, 7.0, 7.5),
    (4, True): (15.0, 13.0, 13.5, 14.0, 14.5, 15.5, 16.0),
}
#: Elements that one call of the compiled search takes: a few MB with its temporaries.
_BLOCK = 1 << 19
_LARGEST_GROUP = 256
#: More than this share of scales that float16 changes by more than 1 in `_PRECISION` asks for
#: float32: matrices whose values are tiny.
_LOST_SHARE, _PRECISION = 0.01, 256
#: Matrices that decide rather than compute; they stay as they are.
_KEPT = ("router",)


class NotFiniteError(StokerError):
    """A matrix to quantise holds an infinity or what is not a number."""


@dataclasses.dataclass(frozen=True)
class Quantisation:
    """What `--quantize` asks for.

    Attributes:
      bits: width of a code, 8 or 4.
      group: columns that share a scale; rows that do not divide by it get smaller groups.
      minimum: groups have a minimum too, beside their scale (4 bits only).
      search: scales are searched that minimise the squared error, rather than taken from the range.
    """

    bits: int
    group: int = 32
    minimum: bool = False
    search: bool = True

    def __post_init__(self) -> None:
        if self.bits not in FORMATS.values():
            raise StokerError(f"codes of {self.bits} bits are not supported; use 8 or 4")
        if not 8 <= self.group <= _LARGEST_GROUP or self.group % 8:
            raise StokerError(
                f"group={self.group} must be a multiple of 8 columns, up to {_LARGEST_GROUP}"
            )
        if self.minimum and self.bits != 4:
            raise StokerError("int8 has no minimum; leave minimum=true out, or use int4")

    @classmethod
    def parse(cls, text: str) -> Quantisation:
        """The value of a flag: `int8` or `int4`, then options, as in `int4:group=64,search=false`.

        int4 has a minimum unless `minimum=false`. Raises `StokerError` for anything else.
        """
        name, _, rest = text.partition(":")
        if name not in FORMATS:
            raise StokerError(
                f"quantisation '{text:.60}' is not known; use {' or '.join(FORMATS)}, with options "
                "after it if need be (int4:group=64,minimum=false)"
            )
        options: dict[str, Any] = {"minimum": name == "int4"}
        for option in rest.split(",") if rest else ():
            key, _, value = option.partition("=")
            if key == "group" and value.isdecimal():
                options[key] = int(value)
            elif key in ("minimum", "search") and value in ("true", "false"):
                options[key] = value == "true"
            else:
                raise StokerError(
                    f"'{option:.40}' is no option of quantisation '{text:.60}'; there are "
                    "group=COLUMNS, minimum=true|false and search=true|false"
                )
        return cls(FORMATS[name], **options)

    def __str__(self) -> str:
        options = [f"group={self.group}"]
        if self.bits == 4:
            options.append(f"minimum={str(self.minimum).lower()}")
        if not self.search:
            options.append("search=false")
        return f"int{self.bits}:{','.join(options)}"

    def group_of(self, columns: int) -> int:
        """Columns that share a scale in rows of `columns`; 0: none fits.

        The largest divisor of `columns` up to `group` that is a multiple of 8; with 8 bits, of 4.
        """
        step = 32 // self.bits
        fits = [g for g in range(step, self.group + 1, step) if columns % g == 0]
        return max(fits, default=0)

    def nbytes(self, shape: tuple[int, ...]) -> int:
        """Bytes of a matrix of `shape` once quantised, with float16 scales."""
        size = math.prod(shape)
        return size * self.bits // 8 + 2 * (1 + self.minimum) * size // self.group_of(shape[-1])


def is_matrix(path: str, parameter: Parameter) -> bool:
    """Whether the parameter of this dotted path is quantised: not norms, biases and routers."""
    name = path.rpartition(".")[2]
    return parameter.dtype == "any" and len(parameter.shape) > 1 and name not in _KEPT


def quantise(
    array: np.ndarray, how: Quantisation, empty: Empty = aligned_empty, columns: int = 0
) -> QuantArray:
    """A dense matrix `[..., R, C]` quantised, with NumPy leaves.

    Scales and minima are float16, or float32 where the range of the values asks for it.

    Args:
      array: float32, bfloat16 or float16; `uneven_groups` has found no fault with its columns.
      how: the format.
      empty: makes the leaves.
      columns: of whole rows, where these are parts of rows.

    Raises:
      NotFiniteError: a value is not.
    """
    group = how.group_of(columns or array.shape[-1])
    # A loop that ends at the first type which does: float32 always does.
    for dtype in (np.float16, np.float32):
        leaves, lost = _quantise(array, how, group, np.dtype(dtype), empty)
        if not lost:
            break
    shape = (*array.shape[:-1], -1)
    parts: Any = [None if leaf is None else leaf.reshape(shape) for leaf in leaves]
    zero_point = 8 if how.bits == 4 and not how.minimum else 0
    statics: Any = {"bits": how.bits, "zero_point": zero_point, "group": group}
    return QuantArray(*parts, **statics)


def uneven_groups(parameters: Mapping[str, Parameter], how: Quantisation) -> dict[int, int]:
    """Columns to the smaller group that matrices of so many columns get, where `how.group` fails.

    Raises `StokerError` where no group fits a matrix, naming it.
    """
    found = {}
    for path, parameter in parameters.items():
        columns = parameter.shape[-1]
        if not is_matrix(path, parameter) or columns % how.group == 0:
            continue
        found[columns] = how.group_of(columns)
        if not found[columns]:
            raise StokerError(
                f"'{path}' has rows of {columns} columns, which do not divide into groups of a "
                f"multiple of {32 // how.bits}, as int{how.bits} needs; leave --quantize out"
            )
    return found


def relative_error(array: np.ndarray, quantised: np.ndarray) -> float:
    """Root of the summed squares of what differs, over that of `array`; both float32."""
    lost, whole = np.float64(0), np.float64(0)
    for one, other in zip(array, quantised, strict=True):
        lost += np.sum(np.square(one - other, dtype=np.float64))
        whole += np.sum(np.square(one, dtype=np.float64))
    return float(np.sqrt(lost / whole)) if whole else 0.0


def _quantise(
    array: np.ndarray, how: Quantisation, group: int, dtype: np.dtype, empty: Empty
) -> tuple[list[Any], bool]:
    """Codes, scales and minima of all groups in a row, and whether `dtype` is too narrow."""
    groups = array.reshape(-1, group)
    count = len(groups)
    size = min(max(_BLOCK // group, 1), 1 << max(count - 1, 1).bit_length())
    codes = empty((count, group * how.bits // 8), np.dtype(np.int8 if how.bits == 8 else np.uint8))
    leaves: list[Any] = [codes, empty((count,), dtype)]
    leaves.append(empty((count,), dtype) if how.minimum else None)
    lost = 0
    for start in range(0, count, size):
        block = groups[start : start + size]
        filled = len(block)
        if filled < size:
            block = np.concatenate([block, np.zeros((size - filled, group), block.dtype)])
        *parts, bad, imprecise = _search(block, how, dtype.name)
        if bad:
            raise NotFiniteError(
                "has values that are not finite numbers and cannot be quantised; convert the model "
                "again"
            )
        lost += int(imprecise)
        for leaf, part in zip(leaves, parts, strict=True):
            if leaf is not None:
                leaf[start : start + filled] = np.asarray(part)[:filled]
        if lost > _LOST_SHARE * count and dtype == np.float16:
            return leaves, True
    return leaves, False


@functools.partial(jax.jit, static_argnames=("how", "dtype"))
def _search(
    block: jax.Array, how: Quantisation, dtype: str
) -> tuple[jax.Array, jax.Array, jax.Array | None, jax.Array, jax.Array]:
    """Codes, scales and minima of `block [N, group]`; whether some value is not finite; losses."""
    # Groups along the last axis: sums over a group are then sums of whole vectors.
    x = block.T.astype(jnp.float32)
    steps = _STEPS[how.bits, how.minimum]
    steps = steps if how.search else steps[:1]
    scale, minimum = (_with_minimum if how.minimum else _symmetric)(x, how, steps)
    stored = scale.astype(dtype)
    least = None if minimum is None else minimum.astype(dtype)
    overflow = ~jnp.isfinite(stored)
    shifted = x
    if least is not None:
        overflow |= ~jnp.isfinite(least)
        shifted = x - least.astype(jnp.float32)
    exact = stored.astype(jnp.float32)
    codes = _round(shifted, _inverse(exact), how)
    imprecise = jnp.abs(exact - scale) * _PRECISION > jnp.abs(scale)
    # One that overflows would be lost altogether.
    lost = jnp.sum(imprecise) + overflow.size * jnp.any(overflow)
    bad = ~jnp.all(jnp.isfinite(x))
    if how.bits == 8:
        return codes.astype(jnp.int8).T, stored, least, bad, lost
    whole = (codes if how.minimum else codes + 8).astype(jnp.uint8)
    half = whole.shape[0] // 2
    return (whole[:half] | whole[half:] << 4).T, stored, least, bad, lost


def _limits(how: Quantisation) -> tuple[float, float]:
    """The least and the largest code, before any zero point."""
    if how.bits == 8:
        return -127.0, 127.0
    return (0.0, 15.0) if how.minimum else (-8.0, 7.0)


def _round(x: jax.Array, inverse: jax.Array, how: Quantisation) -> jax.Array:
    return jnp.clip(jnp.round(x * inverse), *_limits(how))


def _inverse(scale: jax.Array) -> jax.Array:
    # Of what is too small to have one, zero: all codes are then zero.
    return jnp.where(jnp.abs(scale) < jnp.finfo(jnp.float32).tiny, 0, 1 / scale)


def _symmetric(
    x: jax.Array, how: Quantisation, steps: tuple[float, ...]
) -> tuple[jax.Array, jax.Array | None]:
    """Scales `[N]` of groups `x [group, N]`."""
    low, high = x.min(axis=0), x.max(axis=0)
    # Of the two ends, the one further from zero, with its sign.
    end = jnp.where(-low > high, low, high)
    if how.bits == 8:
        end = jnp.abs(end)
    if len(steps) == 1:
        return end / steps[0], None
    grids = jnp.array(steps)[:, None] * _inverse(end)
    _, squares, products = _sums(x, _weights(x), grids, how)
    fitted = products * _inverse(squares)
    # The error is <x x> less this.
    return _best(fitted, -fitted * products), None


def _with_minimum(
    x: jax.Array, how: Quantisation, steps: tuple[float, ...]
) -> tuple[jax.Array, jax.Array | None]:
    """Scales and minima `[N]` of groups `x [group, N]`."""
    low, weights = x.min(axis=0), _weights(x)
    # From the least value on: the sums below then lose nothing to a common offset.
    x = x - low
    width = x.max(axis=0)
    if len(steps) == 1:
        return width / steps[0], low
    whole, total = jnp.sum(weights, axis=0), jnp.sum(weights * x, axis=0)
    grids = jnp.array(steps)[:, None] * _inverse(width)
    ones, squares, products = _sums(x, weights, grids, how)
    fitted = (whole * products - total * ones) * _inverse(whole * squares - ones * ones)
    offset = (total - fitted * ones) * _inverse(whole)
    # The error is <x x> plus this.
    error = -fitted * products - offset * total
    return _best(fitted, error), _best(offset, error) + low


def _weights(x: jax.Array) -> jax.Array:
    """How much an error in each column of groups `x [group, N]` counts; they average to one."""
    size = jnp.abs(x)
    mean = jnp.mean(size, axis=0)
    return (size + 0.25 * mean) * _inverse(1.25 * mean)


def _sums(
    x: jax.Array, weights: jax.Array, grids: jax.Array, how: Quantisation
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """<q>, <q q> and <x q>, each `[K, N]`, for the codes of `x [group, N]` by `grids [K, N]`."""
    ones = squares = products = jnp.zeros_like(grids)
    # Unrolled: XLA then makes one pass over the data; reductions would write all codes down.
    for row, weight in zip(x, weights, strict=True):
        codes = _round(row, grids, how)
        weighted = weight * codes
        ones, squares = ones + weighted, squares + weighted * codes
        products = products + row * weighted
    return ones, squares, products


def _best(values: jax.Array, error: jax.Array) -> jax.Array:
    """Of the candidates `[K, N]`, those `[N]` of the least error."""
    return jnp.take_along_axis(values, jnp.argmin(error, axis=0)[None], axis=0)[0]
