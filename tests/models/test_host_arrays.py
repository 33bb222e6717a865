"""Buffers that JAX adopts as they are."""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
import pytest

from stoker.models.host_arrays import Arena, aligned_empty

SHAPES = [(3, 5), (1,), (2, 0), (1000, 1000), (7, 11, 13), (20 << 20,)]


@pytest.mark.parametrize("kind", ["float16", "uint8", "float32"])
def test_an_arena_gives_disjoint_arrays_that_jax_adopts(kind: str) -> None:
    arena, made = Arena(), []
    for value, shape in enumerate(SHAPES * 2):
        array = arena.empty(shape, np.dtype(kind))
        assert array.shape == shape and array.dtype == kind
        array[...] = value
        made.append(array)
    for value, array in enumerate(made):
        assert (array == value).all()
        if array.size:
            assert array.ctypes.data % 64 == 0
            assert jax.device_put(array).unsafe_buffer_pointer() == array.ctypes.data


def test_threads_share_an_arena(many_switches: None) -> None:
    arena, sizes = Arena(), range(1, 2000)
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(lambda size: arena.empty((size,), np.dtype(np.uint8)), sizes))
    ends = sorted((array.ctypes.data, array.ctypes.data + array.nbytes) for array in made)
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(ends))


def test_an_array_outlives_its_arena() -> None:
    arrays = [Arena().empty((1 << 20,), np.dtype(np.float32)) for _ in range(3)]
    for value, array in enumerate(arrays):
        array[...] = value
    assert [float(array.sum()) for array in arrays] == [0, 1 << 20, 2 << 20]


def test_a_single_aligned_array() -> None:
    array = aligned_empty((33, 3), np.dtype(np.float32))
    assert array.ctypes.data % 64 == 0 and array.shape == (33, 3)
