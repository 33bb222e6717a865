"""The parameters of a request: what is refused and how, choices of one request, and packing."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stoker import SamplingParams, StokerError
from stoker.engine.sampling_rows import idle_sampling, pack_sampling
from stoker.models.ops import Sampling

HUGE = 10**5000

BAD = {
    "temperature": [-0.1, 1e9, math.nan, math.inf, "hot", "1", True, None, HUGE],
    "top_p": [-0.1, 1.1, math.nan, "0.5", False],
    "min_p": [2, -1, math.inf],
    "top_k": [-5, 1.5, True, "3", HUGE, None],
    "seed": [-1, 2**63, 1.0, True, HUGE],
    "max_tokens": [0, -1, True, 2**40, "9"],
    "min_tokens": [-1, 1.5, None, HUGE],
    "n": [0, -1, 129, True, None],
    "repetition_penalty": [0, -1, math.nan, 1e-9, 101, "1.1"],
    "presence_penalty": [3, -2.1, math.nan, True],
    "frequency_penalty": [2.5, -3, math.inf],
    "logprobs": [-1, 21, 10**6, True, 1.5],
    "prompt_logprobs": [-1, 21, True],
    "ignore_eos": [1, "yes", None],
    "stop": [[""], [3], ["x"] * 100, 7, None, {"a": 1}],
    "stop_ids": [[-1], [True], ["3"], 3, "3", [HUGE], None],
    "allowed_ids": [[], [-2], [1.0], "12", 5],
    "logit_bias": [
        {-1: 5},
        {"-1": 5},
        {"abc": 1},
        {"٣": 1},
        {"": 1},
        {"9" * 5000: 1},
        {True: 1},
        {7: 101},
        {7: -100.5},
        {7: math.nan},
        {7: "5"},
        {7: True},
        {7: 1, "7": 2},
        dict.fromkeys(range(513), 1),
        [7, 8],
        7,
        "7",
        None,
    ],
}


@pytest.mark.parametrize("name", BAD)
def test_bad_values_are_refused_by_name(name: str) -> None:
    for value in BAD[name]:
        with pytest.raises(StokerError, match=f"^{name} ") as caught:
            SamplingParams(**{name: value})
        assert len(str(caught.value)) < 250


def test_a_reply_cannot_be_longer_than_itself() -> None:
    with pytest.raises(StokerError, match=r"^min_tokens is 9; .* max_tokens, 8$"):
        SamplingParams(min_tokens=9, max_tokens=8)


@pytest.mark.parametrize("top_k", [0, -1, 1, 512, 10**9])
def test_any_sensible_top_k_is_taken(top_k: int) -> None:
    packed = pack_sampling([SamplingParams(1.0, top_k=top_k)], 16)
    assert packed.top_k.tolist() == [max(top_k, 0)]


@pytest.mark.parametrize("kind", [np.uint8, np.int32, np.int64])
def test_numpy_numbers_are_numbers(kind: type) -> None:
    params = SamplingParams(
        np.float32(0.5), top_k=kind(3), seed=kind(5), max_tokens=kind(9), logit_bias={kind(4): 1}
    )
    assert params == SamplingParams(0.5, top_k=3, seed=5, max_tokens=9, logit_bias={4: 1.0})
    assert pack_sampling([params], 16).key.tolist() == [[0, 5]]


def test_one_value_whatever_it_was_made_from() -> None:
    """Hashable, the order of a mapping forgotten, JSON's keys understood, zeros dropped."""
    made = SamplingParams(logit_bias={"9": 1, 7: -2, 8: 0}, stop="x", stop_ids=[3, 1, 3])
    assert made == SamplingParams(logit_bias={7: -2.0, 9: 1.0}, stop=("x",), stop_ids=(1, 3))
    assert hash(made) == hash(dataclasses.replace(made))
    assert made.biases == ((7, -2.0), (9, 1.0))


@pytest.mark.parametrize("name", ["logit_bias", "stop_ids", "allowed_ids"])
def test_ids_outside_the_vocabulary_are_named(name: str) -> None:
    ids = {99999: 5} if name == "logit_bias" else (3, 99999)
    params = SamplingParams(**{name: ids})
    params.check(100000)
    with pytest.raises(StokerError, match=f"^{name} names token id 99999; .* ids 0 to 511$"):
        params.check(512)
    with pytest.raises(StokerError, match=f"^{name} names"):
        pack_sampling([params], 512)


@pytest.mark.parametrize(
    "options",
    [
        {"logit_bias": dict.fromkeys(range(16), -100)},
        {"logit_bias": {3: -100}, "allowed_ids": (3,)},
        {"logit_bias": {3: 100}, "allowed_ids": (4,)},
    ],
)
def test_something_must_be_allowed(options: dict) -> None:
    with pytest.raises(StokerError, match=r"^logit_bias .* leaves no token"):
        SamplingParams(**options).check(16)


def test_choices_have_seeds_of_their_own() -> None:
    params = SamplingParams(temperature=1, n=128, seed=1, top_k=7)
    children = [params.child(i) for i in range(128)]
    assert children[0] == dataclasses.replace(params, n=1)
    assert len({child.seed for child in children}) == 128
    assert all(child == dataclasses.replace(children[0], seed=child.seed) for child in children)
    assert children == [params.child(i) for i in range(128)]
    other = dataclasses.replace(params, seed=2)
    assert not {other.child(i).seed for i in range(128)} & {child.seed for child in children}
    assert SamplingParams(n=4).child(3).seed is None
    with pytest.raises(StokerError, match=r"^choice is 4"):
        SamplingParams(n=4).child(4)


def test_no_seed_means_a_fresh_one() -> None:
    keys = {tuple(pack_sampling([SamplingParams(1.0)], 16).key[0].tolist()) for _ in range(20)}
    assert len(keys) == 20
    assert pack_sampling([SamplingParams(1.0, seed=2**40 + 1)], 16).key.tolist() == [[2**8, 1]]


EVERYTHING = SamplingParams(
    temperature=0.5,
    top_k=9,
    top_p=0.5,
    min_p=0.25,
    seed=7,
    repetition_penalty=1.5,
    presence_penalty=-1,
    frequency_penalty=2,
    logit_bias={3: 5, 4: -100, 6: -2.5},
    stop_ids=(2,),
    min_tokens=3,
    logprobs=5,
    allowed_ids=(2, 3, 4, 5, 6, 33, 40),
)


def test_one_structure_for_all_requests() -> None:
    """Options never change the tree or its types, so they never recompile."""
    plain = pack_sampling([SamplingParams()], 41)
    full = pack_sampling([EVERYTHING], 41, prompt_lens=[5], end_ids=[1, 2])
    assert jax.tree.map(jnp.shape, plain) == jax.tree.map(jnp.shape, full)
    assert jax.tree.map(jnp.result_type, plain) == jax.tree.map(jnp.result_type, full)


def test_rows_hold_what_was_asked() -> None:
    packed = pack_sampling([SamplingParams(), EVERYTHING], 41, prompt_lens=[4, 5], end_ids=[2, 1])
    assert packed.temperature.tolist() == [0, 0.5]
    assert packed.min_lens.tolist() == [4, 8]
    assert packed.prompt_lens.tolist() == [4, 5]
    assert packed.end_ids[:, :3].tolist() == [[1, 2, -1], [1, -1, -1]]  # a stop id may be said
    assert packed.bias_ids[1, :3].tolist() == [3, 6, -1]
    assert packed.bias_values[1, :3].tolist() == [5, -2.5, 0]
    assert packed.has_mask.tolist() == [False, True]
    assert packed.allowed.tolist() == [[2**32 - 1, 2**9 - 1], [0b1101100, 2**1 + 2**8]]
    assert packed.wants_top.tolist() == [False, True]


def test_rows_of_nobody_ask_for_nothing() -> None:
    idle = idle_sampling(3, 512)
    expected = pack_sampling([SamplingParams(seed=0)] * 3, 512)
    assert jax.tree.all(jax.tree.map(np.array_equal, idle, expected))
    assert not (idle.has_mask.any() or idle.wants_top.any() or (idle.bias_ids >= 0).any())


@pytest.mark.parametrize("narrow", [{"top_k": 1}, {"top_p": 0.0}, {"min_p": 1.0}])
def test_what_leaves_one_token_draws_nothing(narrow: dict) -> None:
    assert pack_sampling([SamplingParams(5.0, **narrow)], 16).temperature.tolist() == [0]


@pytest.mark.parametrize(("ends", "words"), [(range(17), "17 end tokens"), ([16], "all in the")])
def test_odd_end_tokens_are_refused(ends: list[int], words: str) -> None:
    with pytest.raises(StokerError, match=words):
        pack_sampling([SamplingParams()], 16, end_ids=ends)


def test_huge_lengths_do_not_wrap_around() -> None:
    packed: Sampling = pack_sampling([SamplingParams(min_tokens=2**31 - 1)], 16, prompt_lens=[9])
    assert packed.min_lens.tolist() == [2**31 - 1]
