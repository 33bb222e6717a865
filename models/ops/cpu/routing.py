"""The choice of experts, the order of rows and their sums, and norms, by the compiled kernels."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from ...errors import StokerError
from ...parts import Router
from .library import load, why_unavailable
from .matmul import DENSE, isa_number


def route(
    logits: jax.Array,
    choice_bias: jax.Array | None,
    n_chosen: int,
    normalise: bool,
    router: Router,
    *,
    threads: int = 0,
) -> tuple[jax.Array, jax.Array]:
    """Weights float32 and numbers int32 of the experts of each row, both `[T, n_chosen]`.

    A row's bits depend on that row only, and not on the instruction set either.

    Args:
      logits: as all but the last, and both results, of `xla.route`.
      choice_bias: see there.
      n_chosen: see there.
      normalise: see there.
      router: see there.
      threads: most threads to use; 0 for all that XLA has.

    Raises:
      StokerError: the kernels are not available, the router cannot choose so many, or shapes or
        types do not fit.
    """
    _available()
    _matrix("scores of experts", logits, (jnp.float32,))
    E, shape = logits.shape[1], (logits.shape[0], n_chosen)
    router.check(E, n_chosen)
    if n_chosen < 1:
        raise StokerError(f"{n_chosen} experts for each row; there must be at least one")
    bias = jnp.zeros(0, jnp.float32) if choice_bias is None else choice_bias
    if choice_bias is not None:
        _expect("the bias of choices", choice_bias, jnp.float32, (E,))
    call = jax.ffi.ffi_call(
        "stoker_route",
        (jax.ShapeDtypeStruct(shape, jnp.float32), jax.ShapeDtypeStruct(shape, jnp.int32)),
        vmap_method="sequential",
    )
    weights, chosen = call(
        logits,
        bias,
        sigmoid=router.scores == "sigmoid",
        normalise=normalise,
        groups=np.int64(router.groups),
        used_groups=np.int64(router.used_groups),
        group_top=np.int64(router.group_top),
        scale=np.float32(router.scale),
        threads=np.int64(threads),
    )
    return weights, chosen


def deal(
    chosen: jax.Array, first: jax.Array | int, held: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Sorts the pairs of a row and one of its experts by expert.

    Args and results as of `xla.deal`.

    Raises:
      StokerError: the kernels are not available, or shapes or types do not fit.
    """
    _available()
    _matrix("numbers of experts", chosen, (jnp.int32,))
    shapes = ((chosen.size,), chosen.shape, (held,))
    call = jax.ffi.ffi_call(
        "stoker_deal",
        tuple(jax.ShapeDtypeStruct(shape, jnp.int32) for shape in shapes),
        vmap_method="sequential",
    )
    rows, places, sizes = call(chosen, jnp.asarray(first, jnp.int32))
    return rows, places, sizes


def combine(
    x: jax.Array, places: jax.Array, weights: jax.Array, *, isa: str = "best", threads: int = 0
) -> jax.Array:
    """Rows `places [T, n]` of `x [N, D]`, summed by `weights [T, n]`: float32 `[T, D]`.

    A row is one chain of multiply-adds, in order of its places. Places outside x are an error of
    the runtime when the call is executed.

    Raises:
      StokerError: the kernels are not available, or shapes or types do not fit.
    """
    _available()
    _matrix("rows of experts", x, DENSE)
    _matrix("places", places, (jnp.int32,))
    _expect("weights of rows", weights, jnp.float32, places.shape)
    call = jax.ffi.ffi_call(
        "stoker_combine",
        jax.ShapeDtypeStruct((places.shape[0], x.shape[1]), jnp.float32),
        vmap_method="sequential",
    )
    isa_index, wide = np.int64(isa_number(isa)), x.astype(jnp.float32)
    return call(wide, places, weights, isa=isa_index, threads=np.int64(threads))


def rms_norm(
    x: jax.Array, weight: jax.Array, eps: float, *, isa: str = "best", threads: int = 0
) -> jax.Array:
    """`x [T, D]` over its root mean square, times `weight [D]`: float32, as `products` norms it.

    Raises:
      StokerError: the kernels are not available, or shapes or types do not fit.
    """
    _available()
    _matrix("rows to norm", x, DENSE)
    _expect("the weight of a norm", weight, jnp.float32, x.shape[1:])
    call = jax.ffi.ffi_call(
        "stoker_rms_norm",
        jax.ShapeDtypeStruct(x.shape, jnp.float32),
        vmap_method="sequential",
    )
    return call(
        x.astype(jnp.float32),
        weight,
        eps=np.float32(eps),
        isa=np.int64(isa_number(isa)),
        threads=np.int64(threads),
    )


def _available() -> None:
    if load() is None:
        raise StokerError(str(why_unavailable()))


def _matrix(name: str, x: jax.Array, dtypes: Sequence[type]) -> None:
    if x.ndim != 2 or x.dtype not in dtypes:
        names = ", ".join(jnp.dtype(dtype).name for dtype in dtypes)
        raise StokerError(
            f"{name} are {x.dtype}{list(x.shape)}; they must be a matrix, of one of: {names}"
        )


def _expect(name: str, array: jax.Array, dtype: type, shape: tuple[int, ...]) -> None:
    if array.shape != shape or array.dtype != dtype:
        raise StokerError(
            f"{name}: got {array.dtype}{list(array.shape)}; it must be "
            f"{jnp.dtype(dtype)}{list(shape)}"
        )
