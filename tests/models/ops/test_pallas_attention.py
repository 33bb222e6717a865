"""Attention over ragged pages as the TPU and GPU kernels do it, interpreted, against float64."""

from __future__ import annotations

import dataclasses
from typing import Any

import interpreted
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from ragged import GRID, SHARED, TOLERANCES, Case, Step, check, check_shares, ragged_step

from stoker.models.ops import Layout, gpu, tpu

KERNELS = {"tpu": tpu.attention, "gpu": gpu.attention}
PARTIAL = {"tpu": tpu.partial_attention, "gpu": gpu.partial_attention}


@pytest.fixture(params=KERNELS)
def platform(request: pytest.FixtureRequest) -> str:
    """Whose kernel runs."""
    return request.param


def ragged(case: Case, platform: str) -> Step:
    """A random step, with values laid out as the platform's kernels want them."""
    by_token = platform == "gpu" or case.H % 128 == 0
    return ragged_step(dataclasses.replace(case, by_token=by_token))


def attend(step: Step, platform: str, interpret: Any = True) -> Any:
    """The step's attention, interpreted."""

    def run(*arrays: Any) -> Any:
        return KERNELS[platform](*arrays, interpret=interpret, **step.options)

    return interpreted.run(run, *step.arrays, step.layout)


@pytest.mark.parametrize("name", GRID)
def test_kernel_equals_float64(name: str, platform: str) -> None:
    case = GRID[name]
    step = ragged(case, platform)
    check(step, attend(step, platform), TOLERANCES[case.dtype])


@pytest.mark.parametrize("name", SHARED)
def test_parts_of_pages_make_up_the_whole(name: str, platform: str) -> None:
    """On TPUs, where a part is not seen at all, memory that nobody wrote is NaN."""
    step = ragged(SHARED[name], platform)
    strict = platform == "tpu" and name == "unseen"
    options = {name: value for name, value in step.options.items() if name != "sinks"}
    options |= {"shares": 4, "interpret": pltpu.InterpretParams() if strict else True}

    def part(share: Any, *arrays: Any) -> Any:
        return PARTIAL[platform](*arrays, share=share, **options)

    check_shares(step, interpreted.jitted(part), 4, TOLERANCES["float32"])


@pytest.mark.parametrize("case", [
    Case((9, 1, 1), (300, 40, 20), N=2, K=1, H=128, Z=16),
    Case((1, 1, 0), (150, 3, 5), N=2, K=1, H=16, Z=16, window=60),
])  # fmt: skip
def test_nothing_is_read_before_it_arrived_on_a_tpu(case: Case) -> None:
    """Copies move when they are awaited here, and memory that nobody wrote is NaN."""
    step = ragged(case, "tpu")
    check(step, attend(step, "tpu", pltpu.InterpretParams()), TOLERANCES["float32"])


def test_many_pages_are_split_between_programs_of_a_gpu() -> None:
    step = ragged(Case((1, 1, 1), (700, 5, 90), N=4, K=1, H=16, Z=16, sinks=True), "gpu")
    check(step, attend(step, "gpu"), TOLERANCES["float32"])


def test_rows_past_the_pages_write_nothing_and_yield_nan(platform: str) -> None:
    step = ragged(Case((3, 2), (34, 20), N=2, K=1, H=16, Z=16, padding=0), platform)
    short = dataclasses.replace(step.layout, page_table=step.layout.page_table[:, :2])
    out, k_pages, _ = attend(dataclasses.replace(step, layout=short), platform)
    np.testing.assert_array_equal(np.isnan(out).all(axis=(1, 2)), [False, True, True, False, False])
    untouched = int(step.layout.page_table[0, 2])
    np.testing.assert_array_equal(k_pages[untouched], step.arrays[3][untouched])


def test_a_nan_stays_in_its_slot(platform: str) -> None:
    step = ragged(Case((2, 1, 2), (6, 5, 4), N=2, K=1, H=16, Z=16), platform)
    q, k, v, *pages = step.arrays
    ill = dataclasses.replace(step, arrays=(q, k.at[2].set(jnp.nan), v.at[2].set(jnp.nan), *pages))
    out, *_ = attend(ill, platform)
    np.testing.assert_array_equal(np.isnan(out).any(axis=(1, 2)), [0, 0, 1, 0, 0, 0, 0])


def test_padding_slots_share_the_dump_page(platform: str) -> None:
    """As decode steps are padded: one row, length 1, and a table of zeros."""
    step = ragged(Case((1, 1, 1), (20, 1, 1), N=2, K=1, H=16, Z=16, padding=0), platform)
    table = step.layout.page_table.at[1:].set(0)
    layout = Layout(step.layout.query_start, step.layout.kv_lens, table)
    out, *_ = attend(dataclasses.replace(step, layout=layout), platform)
    np.testing.assert_allclose(out[0], step.expected[0], rtol=2e-5, atol=2e-5)
