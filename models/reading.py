"""From tensors to parameters, one at a time: rows chosen, stacked, reordered and quantised."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import jax
import numpy as np

from .config import ModelConfig
from .errors import StokerError
from .families.naming import Naming, TensorUse
from .host_arrays import aligned_empty
from .parameters import Parameter, abstract_params, named_parameters
from .quantise import NotFiniteError, Quantisation, is_matrix, uneven_groups
from .quantise import quantise as quantise_matrix
from .quantized import QuantArray, dequantize

_LOG = logging.getLogger("stoker")
#: Elements that are made dense at a time.
_DENSE_BLOCK = 1 << 20

#: Called with the bytes done and the bytes in all.
Progress = Callable[[int, int], None]


class Tensors(Protocol):
    """What is asked of a checkpoint here."""

    @property
    def tensors(self) -> Mapping[str, Any]:
        """What is known of each tensor by name: at least `shape` and `nbytes`."""

    def load(self, name: str, rows: slice = ...) -> np.ndarray | QuantArray:
        """A tensor, or a slice of its rows."""

    def release(self, name: str) -> None:
        """Lets the system drop the pages of a tensor."""


def read_parameters(
    checkpoint: Tensors,
    naming: Naming,
    config: ModelConfig,
    *,
    quantise: Quantisation | None = None,
    dense: str | None = None,
    progress: Progress | None = None,
) -> Iterator[tuple[str, Any]]:
    """Yields dotted path and value of each parameter, the largest first.

    One is in memory at a time, unless the caller keeps it: a tensor, and what became of it.

    Args:
      checkpoint: one that fits `config`.
      naming: how it calls the parameters.
      config: the architecture.
      quantise: what becomes of dense matrices; None: they stay dense. Those that are quantised
        already stay as they are.
      dense: first, matrices that are quantised become dense, and all of this type.
      progress: told how many bytes of tensors have been read.

    Yields:
      NumPy arrays, norms and biases in float32, or `QuantArray`s with NumPy leaves.

    Raises:
      StokerError: there was to be quantised, but no matrix is dense, or one has columns that no
        group fits or values that are not finite.
    """
    uses, parameters = naming.uses(config), dict(named_parameters(abstract_params(config)))
    if quantise is not None:
        for columns, group in uneven_groups(parameters, quantise).items():
            _LOG.warning(
                "stoker: rows of %d columns do not divide into groups of %d; theirs are of %d",
                *(columns, quantise.group, group),
            )
    sizes = {path: _stored_bytes(checkpoint, use) for path, use in uses.items()}
    total, done, quantised = sum(sizes.values()), 0, 0
    for path in sorted(parameters, key=lambda path: -sizes[path]):
        parameter = parameters[path]
        if is_matrix(path, parameter):
            convert = _Convert(quantise, dense)
        else:
            convert = _Convert(None, None if parameter.dtype == "any" else parameter.dtype)
        try:
            value = _parameter(checkpoint, uses[path], parameter, convert)
        except NotFiniteError as error:
            raise StokerError(f"'{path}' {error}") from None
        order = naming.row_order(path, config)
        if order is not None:
            # A gather of rows moves codes and scales together: nothing is requantised.
            value = jax.tree.map(lambda leaf, order=order: leaf[order], value)
        quantised += convert.quantised
        yield path, value
        # What the caller does not keep must not stay while the next one is read.
        del value
        done += sizes[path]
        if progress is not None:
            progress(done, total)
    if quantise is not None and not quantised:
        raise StokerError(
            "every matrix of this model is quantised already; leave --quantize out, or convert it "
            "to dense ones first (stoker convert --dtype=float32)"
        )


class _Convert:
    """Makes parts of one parameter dense of a type or quantised, and remembers if it quantised."""

    def __init__(self, how: Quantisation | None, dense: str | None) -> None:
        self._how, self._dense = how, dense
        self.quantised = False

    def __call__(self, part: Any) -> Any:
        if self._dense is not None:
            part = _dense(part, np.dtype(self._dense))
        if self._how is None or isinstance(part, QuantArray):
            return part
        self.quantised = True
        return quantise_matrix(part, self._how)


def _dense(part: Any, dtype: np.dtype) -> np.ndarray:
    """A part as a dense array of `dtype`; quantised ones a few rows at a time."""
    if not isinstance(part, QuantArray):
        return part if part.dtype == dtype else part.astype(dtype)
    result = aligned_empty(part.shape, dtype)
    flat = result.reshape(-1, part.shape[-1])
    rows = jax.tree.map(lambda leaf: leaf.reshape(-1, leaf.shape[-1]), part)
    step = max(1, _DENSE_BLOCK // part.shape[-1])
    for start in range(0, len(flat), step):
        flat[start : start + step] = dequantize(
            jax.tree.map(lambda leaf, at=start: leaf[at : at + step], rows)
        )
    return result


def _stored_bytes(checkpoint: Tensors, use: TensorUse) -> int:
    """Bytes that one parameter takes in the file; several may share a tensor, by rows."""
    rows = range(use.shape[0])
    whole = sum(checkpoint.tensors[name].nbytes for name in use.tensors)
    return whole // len(rows) * len(rows[use.rows])


def _parameter(
    checkpoint: Tensors, use: TensorUse, parameter: Parameter, convert: Callable[[Any], Any]
) -> Any:
    """One parameter with NumPy leaves, its parts converted as they are read."""
    value: Any = None
    leaves: list[np.ndarray] = []
    for index, name in enumerate(use.tensors):
        part: Any = checkpoint.load(name, use.rows)
        checkpoint.release(name)
        part = convert(part)
        if len(use.tensors) == 1 and part.shape == parameter.shape:
            value = part
            break
        parts, structure = jax.tree.flatten(part)
        if index == 0:
            count = parameter.shape[0]
            leaves = [aligned_empty((count, *leaf.shape), leaf.dtype) for leaf in parts]
        for place, leaf in enumerate(parts):
            # Scales of one expert may need float32 where those of others did not.
            if leaf.dtype.itemsize > leaves[place].dtype.itemsize:
                leaves[place] = leaves[place].astype(leaf.dtype)
            leaves[place][index] = leaf
        value = jax.tree.unflatten(structure, leaves)
    if use.added:
        value = value + np.asarray(use.added, value.dtype)
    return value
