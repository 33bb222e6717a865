"""The small arrays of a step as one, for meshes.

To split an array of the host over a mesh, JAX takes a path that costs about as much for three
numbers as for three thousand. A step has three to seven such arrays; as one they cost one trip.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def pack(arrays: Any, parts: int) -> np.ndarray:
    """Integers and booleans as int32 `[parts, n]`: a row for each part of their first axes.

    Args:
      arrays: a tree of NumPy arrays, whose first axes are those of the parts one after another.
      parts: of the mesh's `data` axis.
    """
    flat = [np.asarray(leaf).reshape(parts, -1) for leaf in jax.tree.leaves(arrays)]
    return np.concatenate(flat, axis=1, dtype=np.int32)


def packed_shape(arrays: Any, parts: int) -> jax.ShapeDtypeStruct:
    """What `pack` returns for arrays, or their shapes."""
    total = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(arrays))
    return jax.ShapeDtypeStruct((parts, total // parts), np.int32)


def from_packed(step: Callable[..., Any], arrays: Any, parts: int) -> Callable[..., Any]:
    """`step(params, cache, state, *arrays)` as a function of one part's row in their place.

    Args:
      step: a function of `engine/steps.py`.
      arrays: of all parts, or their shapes.
      parts: of the mesh's `data` axis.
    """
    leaves, structure = jax.tree.flatten(arrays)
    shapes = [(leaf.shape[0] // parts, *leaf.shape[1:]) for leaf in leaves]
    ends = np.cumsum([math.prod(shape) for shape in shapes])[:-1].tolist()
    dtypes = [leaf.dtype for leaf in leaves]

    @functools.wraps(step)
    def run(params: Any, cache: Any, state: Any, row: jax.Array, **static: Any) -> Any:
        pieces = jnp.split(row[0], ends)
        own = [
            piece.reshape(shape).astype(dtype)
            for piece, shape, dtype in zip(pieces, shapes, dtypes, strict=True)
        ]
        return step(params, cache, state, *jax.tree.unflatten(structure, own), **static)

    return run
