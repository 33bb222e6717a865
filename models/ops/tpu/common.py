"""What the TPU kernels share."""

from __future__ import annotations

import jax
import jax.numpy as jnp

#: Float32 stays float32 on the matrix units.
EXACT = jax.lax.Precision.HIGHEST
#: Lanes of a vector register, and of the least tile of memory.
LANES = 128
#: What a kernel may use of the vector memory: kernels for v5e, v5p and v6e compile within it.
VMEM_BYTES = 56 * 2**20


def tile_rows(dtype: jnp.dtype) -> int:
    """Rows of the least tile of memory of a type: 8 of four bytes, 16 of two, 32 of one."""
    return 32 // jnp.dtype(dtype).itemsize
