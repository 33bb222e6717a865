"""Which part of a checkpoint's tensors some rows of a parameter come from."""

from __future__ import annotations

import dataclasses

import numpy as np

from ..families.naming import TensorUse
from ..parameters import Parameter

#: How a parameter comes out of tensors, what it is, and which of the rows in the file are its rows.
Source = tuple[TensorUse, Parameter, np.ndarray | None]


def narrowed(source: Source, first: int, last: int) -> Source:
    """The source of elements `first` to `last - 1` of a parameter's first axis.

    Those are rows of one tensor, whole tensors where each expert has its own, experts of one tensor
    that all share, or the rows of some heads. Rows that come in another order than in the file are
    those of the same heads there, and neighbours but for that order.
    """
    use, parameter, order = source
    stacked = len(parameter.shape) > len(use.shape) and not use.heads
    parameter = dataclasses.replace(parameter, shape=(last - first, *parameter.shape[1:]))
    if stacked:
        return dataclasses.replace(use, tensors=use.tensors[first:last]), parameter, None
    whole = range(use.shape[0])[use.rows]
    if use.heads:
        each = len(whole if order is None else order) // use.heads
        use = dataclasses.replace(use, heads=last - first)
        first, last = first * each, last * each
    if order is not None:
        wanted = order[first:last]
        first, last = int(wanted.min()), int(wanted.max()) + 1
        order = wanted - first
    rows = slice(whole.start + first, whole.start + last)
    return dataclasses.replace(use, rows=rows), parameter, order
