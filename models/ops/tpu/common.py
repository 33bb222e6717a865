"""What the TPU kernels share."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

#: Float32 stays float32 on the matrix units.
EXACT = jax.lax.Precision.HIGHEST
#: Lanes of a vector register, and of the least tile of memory.
LANES = 128
#: What a kernel may use of the vector memory: kernels for v5e, v5p and v6e compile within it.
VMEM_BYTES = 56 * 2**20


def tile_rows(dtype: jnp.dtype) -> int:
    """Rows of the least tile of memory of a type: 8 of four bytes, 16 of two, 32 of one."""
    return 32 // jnp.dtype(dtype).itemsize


def in_memory(pages: jax.Array, interpret: Any) -> jax.Array:
    """Pages, as an argument of a kernel, which XLA is to leave in the device's main memory.

    Where they fit, it would fetch them into vector memory in every step, whole. Interpreted kernels
    know one memory.
    """
    return pages if interpret else pltpu.with_memory_space_constraint(pages, pltpu.HBM)
