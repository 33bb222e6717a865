"""Which part of a checkpoint's tensors a part of a parameter comes from."""

from __future__ import annotations

import dataclasses

import numpy as np

from ..families.naming import TensorUse
from ..parameters import Parameter

#: How a parameter comes out of tensors, what it is, and which of the rows in the file are its rows.
Source = tuple[TensorUse, Parameter, np.ndarray | None]


def narrowed(source: Source, index: tuple[slice, ...]) -> Source:
    """The source of a part of a parameter, by slices of its axes; the last may be left out.

    Of the first axis those are rows of one tensor, whole tensors where each expert has its own,
    experts of one tensor that all share, or the rows of some heads. Rows that come in another order
    than in the file are those of the same heads there, and neighbours but for that order.
    """
    use, parameter, order = source
    spans = [span.indices(size)[:2] for span, size in zip(index, parameter.shape, strict=False)] + [
        (0, size) for size in parameter.shape[len(index) :]
    ]
    stacked = len(parameter.shape) > len(use.shape) and not use.heads
    parameter = dataclasses.replace(parameter, shape=tuple(b - a for a, b in spans))
    if use.heads:
        # Only heads are ever cut.
        assert parameter.shape[1:] == source[1].shape[1:]
    elif len(use.shape) - (use.outputs is not None) > 1:
        use = dataclasses.replace(use, columns=slice(*spans[-1]))
    first, last = spans[0]
    if stacked:
        rows = _within(use.rows, use.shape[0], *spans[1])
        return dataclasses.replace(use, tensors=use.tensors[first:last], rows=rows), parameter, None
    if use.outputs is not None or len(use.shape) == 3:
        outputs = _within(use.outputs or slice(None), use.shape[1], *spans[1])
        use = dataclasses.replace(use, rows=slice(first, last), outputs=outputs)
        return use, parameter, None
    count = len(range(use.shape[0])[use.rows]) if order is None else len(order)
    if use.heads:
        each = count // use.heads
        use = dataclasses.replace(use, heads=last - first)
        first, last = first * each, last * each
    if order is not None:
        wanted = order[first:last]
        first, last = int(wanted.min()), int(wanted.max()) + 1
        order = wanted - first
    use = dataclasses.replace(use, rows=_within(use.rows, use.shape[0], first, last))
    return use, parameter, order


def _within(whole: slice, size: int, first: int, last: int) -> slice:
    """Elements `first` to `last - 1` of those of an axis that a slice names."""
    part = range(size)[whole][first:last]
    return slice(part.start, part.stop, part.step)
