"""What devices of a mesh tell each other, inside `jax.shard_map`; nothing where no axis is named.

`axes` are names of mesh axes, as `Split.resolve` gives them.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp

Axes = Sequence[str]


def part(axes: Axes) -> jax.Array | int:
    """Which part of an axis that is split over `axes` this device holds."""
    return jax.lax.axis_index(tuple(axes)) if axes else 0


def total(x: jax.Array, axes: Axes) -> jax.Array:
    """The sum of the parts' arrays, on all of them: one all-reduce."""
    return jax.lax.psum(x, tuple(axes)) if axes else x


def joined(x: jax.Array, axes: Axes) -> jax.Array:
    """The parts' arrays one after another, on all of them: one all-gather."""
    return jax.lax.all_gather(x, tuple(axes), axis=0, tiled=True) if axes else x


def exchanged(x: jax.Array, axes: Axes) -> jax.Array:
    """From all rows of some columns to some rows of all columns: one all-to-all.

    `[n b, c]` on each of n parts becomes `[b, n c]`: part i gets rows i b to (i + 1) b.
    """
    if not axes:
        return x
    return jax.lax.all_to_all(x, tuple(axes), split_axis=0, concat_axis=1, tiled=True)


def dealt(x: jax.Array, parts: int, axes: Axes) -> jax.Array:
    """This part's rows of an array that all of them have; rows must divide by `parts`."""
    if not axes:
        return x
    rows = x.shape[0] // parts
    return jax.lax.dynamic_slice_in_dim(x, part(axes) * rows, rows)


def padded_rows(x: jax.Array, multiple: int, value: int = 0) -> jax.Array:
    """`x` with rows of `value` added until they are a multiple."""
    missing = -x.shape[0] % multiple
    if not missing:
        return x
    return jnp.pad(x, ((0, missing), *((0, 0),) * (x.ndim - 1)), constant_values=value)
