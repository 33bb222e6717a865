"""From tensors to parameters, one at a time: rows chosen, stacked, reordered and quantised."""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import jax
import numpy as np

from ..config import ModelConfig
from ..errors import StokerError
from ..families.naming import Naming, TensorUse
from ..host_arrays import aligned_empty
from ..parameters import Parameter, abstract_params, named_parameters
from ..placing.placement import Reader
from ..quantise import NotFiniteError, Quantisation, is_matrix, uneven_groups
from ..quantise import quantise as quantise_matrix
from ..quantized import QuantArray, dequantize
from .narrowing import Source, narrowed

_LOG = logging.getLogger("stoker")
#: Elements that are made dense at a time.
_DENSE_BLOCK = 1 << 20
_SCALES = {np.dtype(np.float16), np.dtype(np.float32)}

T = TypeVar("T")

#: Called with the bytes done and the bytes in all.
Progress = Callable[[int, int], None]
#: What is made of a part of a parameter.
Convert = Callable[[Any], Any]


class Tensors(Protocol):
    """What is asked of a checkpoint here."""

    @property
    def tensors(self) -> Mapping[str, Any]:
        """What is known of each tensor by name: at least `shape`, `nbytes`, `quantised` and `unit`,
        the columns that can only be read together (see `Reader.unit`)."""

    def load(self, name: str, *index: slice) -> np.ndarray | QuantArray:
        """A tensor, or what slices of its axes are; the last ones may be left out."""

    def release(self, name: str) -> None:
        """Lets the system drop the pages of a tensor."""


def read_parameters(
    checkpoint: Tensors,
    naming: Naming,
    config: ModelConfig,
    *,
    quantise: Quantisation | None = None,
    dense: str | None = None,
) -> dict[str, Reader]:
    """The reader of each parameter by its dotted path, the largest first.

    Nothing is kept here: a reader holds, while it runs, one tensor and what becomes of it, or of
    the part that it was asked for; several may run at once. Parts have the values of the whole, bit
    for bit; where they are quantised here, but for roundings of a search that small ones run as
    another program.

    Args:
      checkpoint: one that fits `config`.
      naming: how it calls the parameters.
      config: the architecture.
      quantise: what becomes of dense matrices; None: they stay dense. Those that are quantised
        already stay as they are.
      dense: first, matrices that are quantised become dense, and all of this type.

    Returns:
      Readers of NumPy arrays, norms and biases in float32, or `QuantArray`s with NumPy leaves.

    Raises:
      StokerError: there was to be quantised, but no matrix is dense, or one has columns that no
        group fits or values that are not finite.
    """
    uses, parameters = naming.uses(config), dict(named_parameters(abstract_params(config)))
    if quantise is not None:
        if dense is None:
            _check_dense(checkpoint, uses, parameters)
        for columns, group in uneven_groups(parameters, quantise).items():
            _LOG.warning(
                "stoker: rows of %d columns do not divide into groups of %d; theirs are of %d",
                *(columns, quantise.group, group),
            )
    sizes = {path: _stored_bytes(checkpoint, use, parameters[path]) for path, use in uses.items()}
    readers = {}
    for path in sorted(parameters, key=lambda path: -sizes[path]):
        parameter = parameters[path]
        columns = parameter.shape[-1]
        units = [checkpoint.tensors[name].unit for name in uses[path].tensors]
        if is_matrix(path, parameter):
            convert = functools.partial(_converted, how=quantise, dense=dense, columns=columns)
            units += [quantise.group_of(columns)] if quantise is not None else []
        else:
            kept = None if parameter.dtype == "any" else parameter.dtype
            convert = functools.partial(_converted, how=None, dense=kept, columns=columns)
        source = (uses[path], parameter, naming.row_order(path, config))

        def part(
            index: tuple[slice, ...],
            path: str = path,
            source: Source = source,
            convert: Convert = convert,
        ) -> Any:
            try:
                own = narrowed(source, index) if index else source
                return _parameter(checkpoint, *own, convert, config.compute_dtype)
            except NotFiniteError as error:
                raise StokerError(f"'{path}' {error}") from None

        unit = math.lcm(*units) if len(parameter.shape) > 1 else 1
        readers[path] = Reader(unit, part, sizes[path])
    return readers


def reported(items: Iterable[T], sizes: Sequence[int], progress: Progress | None) -> Iterator[T]:
    """Yields items, and tells `progress` of each one's bytes once it is done with."""
    done, total = 0, sum(sizes)
    for item, size in zip(items, sizes, strict=True):
        yield item
        done += size
        if progress is not None:
            progress(done, total)


def _check_dense(
    checkpoint: Tensors, uses: Mapping[str, TensorUse], parameters: Mapping[str, Parameter]
) -> None:
    """Raises `StokerError` where no matrix is dense, or becomes so before it is quantised."""
    for path, use in uses.items():
        quantised = all(checkpoint.tensors[name].quantised for name in use.tensors)
        if is_matrix(path, parameters[path]) and (use.transposed or not quantised):
            return
    raise StokerError(
        "every matrix of this model is quantised already; leave --quantize out, or convert it "
        "to dense ones first (stoker convert --dtype=float32)"
    )


def _converted(part: Any, how: Quantisation | None, dense: str | None, columns: int) -> Any:
    """A part of one parameter, whose rows have so many columns: dense of a type or quantised."""
    if dense is not None:
        part = _dense(part, np.dtype(dense))
    if how is None or isinstance(part, QuantArray):
        return part
    return quantise_matrix(part, how, columns=columns)


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


def _stored_bytes(checkpoint: Tensors, use: TensorUse, parameter: Parameter) -> int:
    """Bytes that one parameter takes in the file; several may share a tensor."""
    whole = sum(checkpoint.tensors[name].nbytes for name in use.tensors)
    return whole * parameter.size // (len(use.tensors) * math.prod(use.shape))


def is_turned(checkpoint: Tensors, name: str, use: TensorUse) -> bool:
    """Whether a tensor holds the transposes of its matrices."""
    return use.turned_floats and not checkpoint.tensors[name].quantised


def _parameter(
    checkpoint: Tensors,
    use: TensorUse,
    parameter: Parameter,
    order: np.ndarray | None,
    convert: Convert,
    dtype: np.dtype,
) -> Any:
    """One parameter with NumPy leaves, its rows in `order`, its parts converted as they are read.

    Quantised matrices that cannot stay so take `dtype`, in which they are multiplied.
    """
    parts = _parts(checkpoint, use)
    if use.heads:
        ((_, whole),) = parts
        return convert(_by_heads(_reordered(whole, order), use, dtype))
    converted = ((name, convert(part)) for name, part in parts)
    if len(parameter.shape) > len(use.shape) - (use.outputs is not None):
        return _stacked(converted, parameter.shape[0])
    ((_, value),) = converted
    value = _reordered(value, order)
    return value + np.asarray(use.added, value.dtype) if use.added else value


def _reordered(value: Any, order: np.ndarray | None) -> Any:
    """Rows in `order`: codes and scales move together, and nothing is requantised."""
    return value if order is None else jax.tree.map(lambda leaf: leaf[order], value)


def _parts(checkpoint: Tensors, use: TensorUse) -> Iterator[tuple[str, Any]]:
    """What one parameter is stacked from, each with the tensor it is of; or all of it, once."""
    columns = use.columns or slice(None)
    if use.outputs is None:
        # One without columns is a vector.
        index = (use.rows, *(slice(None),) * (len(use.shape) - 2), columns)
        for name in use.tensors:
            part = checkpoint.load(name, *index[: len(use.shape)])
            checkpoint.release(name)
            yield name, part
            del part
        return
    (name,) = use.tensors
    turned = is_turned(checkpoint, name, use)
    inner = (columns, use.outputs) if turned else (use.outputs, columns)
    for expert in range(use.shape[0])[use.rows]:
        part = checkpoint.load(name, slice(expert, expert + 1), *inner[: len(use.shape) - 1])
        yield name, jax.tree.map(lambda leaf: leaf[0].swapaxes(0, 1) if turned else leaf[0], part)
    checkpoint.release(name)


def _stacked(parts: Iterator[tuple[str, Any]], count: int) -> Any:
    """`count` arrays, quantised or not, as one; StokerError where they are of several formats."""
    leaves: list[np.ndarray] = []
    structure: Any = None
    for index, (name, part) in enumerate(parts):
        found, kind = jax.tree.flatten(part)
        if index == 0:
            structure = kind
            leaves = [aligned_empty((count, *leaf.shape), leaf.dtype) for leaf in found]
        same = kind == structure and all(
            leaf.shape == stack.shape[1:] for leaf, stack in zip(found, leaves, strict=True)
        )
        for place, leaf in enumerate(found if same else ()):
            stack = leaves[place]
            # Scales of one expert may need float32 where those of others did not.
            if {leaf.dtype, stack.dtype} == _SCALES and isinstance(part, QuantArray):
                stack = leaves[place] = stack.astype(np.float32)
            elif leaf.dtype != stack.dtype:
                same = False
                break
            stack[index] = leaf
        if not same:
            raise StokerError(
                f"tensor '{name}' is of another format than those of the other experts of its "
                "layer, which is not supported; give a model whose experts are all alike"
            )
    return jax.tree.unflatten(structure, leaves)


def _by_heads(value: Any, use: TensorUse, dtype: np.dtype) -> Any:
    """A matrix `[heads * R, C]` as `[heads, R, C]`, or `[heads, C, R]` where it is transposed."""
    if use.transposed and isinstance(value, QuantArray):
        value = np.asarray(dequantize(value, dtype))
    value = jax.tree.map(lambda leaf: leaf.reshape(use.heads, -1, *leaf.shape[1:]), value)
    if not use.transposed:
        return value
    turned = value.swapaxes(1, 2)
    dense = aligned_empty(turned.shape, turned.dtype)
    dense[...] = turned
    return dense
