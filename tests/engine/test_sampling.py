"""What is chosen for whole requests: edits, limits, seeds, log-probabilities, neighbours."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import numpy as np
import pytest
from tiny import KERNELS

from stoker import SamplingParams
from stoker.engine.sampling import Outputs, choose
from stoker.engine.sampling_rows import pack_sampling
from stoker.models.ops import uniforms

V = 300
RNG = np.random.default_rng(0)
LOGITS = RNG.normal(0, 3, V).astype(np.float32)
PROMPT = [5, 9, 9, 250]
REPLY = [7, 9, 7, 7, 299]


@pytest.fixture(scope="module", params=KERNELS)
def platform(request: pytest.FixtureRequest) -> str:
    return request.param


@functools.lru_cache
def chooser(platform: str):
    return jax.jit(functools.partial(choose, kernels=KERNELS[platform], top=20))


def pick(
    platform: str,
    logits: np.ndarray,
    requests: Sequence[SamplingParams],
    *,
    prompt: Sequence[int] = PROMPT,
    reply: Sequence[int] = REPLY,
    end_ids: Sequence[int] = (),
    positions: Sequence[int] | None = None,
    capacity: int = 16,
) -> Outputs:
    """What `choose` makes of rows `logits` (one or many), after the same prompt and reply."""
    asked = len(requests)
    # Few sizes, so that few programs are compiled.
    rows = next(size for size in (1, 8, 64, 256) if size >= asked)
    requests = [*requests, *[SamplingParams(seed=0)] * (rows - asked)]
    logits = np.asarray(logits, np.float32)
    if logits.ndim == 2:
        logits = np.pad(logits, ((0, rows - asked), (0, 0)))
    logits = np.broadcast_to(logits, (rows, logits.shape[-1]))
    tokens = [*prompt, *reply]
    # What lies beyond the known tokens must not be read: fill it with one that would show.
    history = np.full((rows, capacity), int(logits[0].argmax()), np.int32)
    history[:, : len(tokens)] = tokens
    places = np.full(rows, len(tokens), np.int32)
    if positions is not None:
        places[:asked] = positions
    sampling = pack_sampling(requests, logits.shape[-1], [len(prompt)] * rows, end_ids)
    slots = np.arange(rows, dtype=np.int32)
    choice = chooser(platform)(logits, sampling, history, slots, places)
    return jax.tree.map(lambda rows: np.asarray(rows)[:asked], choice)


def edited(logits: np.ndarray, params: SamplingParams) -> np.ndarray:
    """Logits as a request changes them, by a loop over tokens in float64."""
    out = logits.astype(np.float64)
    for token, bias in params.biases:
        if abs(bias) < 100:
            out[token] += bias
    for token in range(len(out)):
        if token in PROMPT + REPLY:
            factor = params.repetition_penalty
            out[token] = out[token] * factor if out[token] < 0 else out[token] / factor
        out[token] -= params.frequency_penalty * REPLY.count(token)
        out[token] -= params.presence_penalty * (token in REPLY)
    return out


EDITS = {
    "repetition": {"repetition_penalty": 1.7},
    "repetition below one": {"repetition_penalty": 0.5},
    "presence": {"presence_penalty": 2.0},
    "frequency": {"frequency_penalty": -1.5},
    "bias": {"logit_bias": {7: 30, 8: -20, 299: 31.5, 0: 1}},
    "all": {
        "repetition_penalty": 1.3,
        "presence_penalty": -2.0,
        "frequency_penalty": 0.7,
        "logit_bias": {9: 20, 5: 3, 299: 12.5},
    },
}


@pytest.mark.parametrize("name", EDITS)
def test_edits_are_those_of_a_loop_over_tokens(platform: str, name: str) -> None:
    """Every token's probability is seen through the draws of evenly spaced seeds' numbers."""
    params = SamplingParams(temperature=1.5, seed=1, **EDITS[name])
    expected = edited(LOGITS, params) / 1.5
    weights = np.exp(expected - expected.max())
    running = np.cumsum(weights) / weights.sum()
    requests = [SamplingParams(1.5, seed=seed, **EDITS[name]) for seed in range(256)]
    keys = pack_sampling(requests, V).key
    numbers = np.asarray(uniforms(keys, np.full(256, len(PROMPT + REPLY), np.int32)))
    tokens = pick(platform, LOGITS, requests).tokens
    assert tokens.tolist() == np.searchsorted(running, numbers, side="right").tolist()
    greedy = pick(platform, LOGITS, [SamplingParams(**EDITS[name])]).tokens
    assert greedy.tolist() == [int(expected.argmax())]


@pytest.mark.reference
@pytest.mark.parametrize("penalty", [0.5, 1.2, 3.0])
def test_repetition_penalty_agrees_with_hugging_face(platform: str, penalty: float) -> None:
    import torch
    from transformers import RepetitionPenaltyLogitsProcessor

    processor = RepetitionPenaltyLogitsProcessor(penalty=penalty)
    for seed in range(20):
        logits = np.random.default_rng(seed).normal(1, 1, 24).astype(np.float32)
        history = torch.tensor([[1, 2, 3, 4, 5, 6, 6]])
        want = processor(history, torch.tensor(logits[None]))[0].argmax()
        params = SamplingParams(repetition_penalty=penalty)
        got = pick(platform, logits, [params], prompt=[1, 2, 3], reply=[4, 5, 6, 6])
        assert got.tokens.tolist() == [int(want)]


def test_an_empty_history_has_no_penalties(platform: str) -> None:
    params = SamplingParams(repetition_penalty=100, presence_penalty=2, frequency_penalty=2)
    chosen = pick(platform, LOGITS, [params], prompt=[], reply=[], capacity=0)
    assert chosen.tokens.tolist() == [LOGITS.argmax()]


@pytest.mark.parametrize("temperature", [0, 1, 100])
def test_biases_at_the_ends_force_and_ban(platform: str, temperature: float) -> None:
    best = int(LOGITS.argmax())
    options = {"temperature": temperature, "presence_penalty": 2, "repetition_penalty": 100}
    seeds = range(64)

    def drawn(**more) -> set[int]:
        requests = [SamplingParams(seed=seed, **options, **more) for seed in seeds]
        return set(pick(platform, LOGITS, requests).tokens.tolist())

    assert drawn(logit_bias={"7": 100}) == {7}
    assert drawn(logit_bias={7: 100, 299: -100, 8: 50}) == {7}
    assert drawn(allowed_ids=[7, 299], logit_bias={299: -100}) == {7}
    assert best not in drawn(logit_bias={best: -100})
    assert drawn(allowed_ids=[9, 64, 299]) <= {9, 64, 299}


def test_neighbours_are_left_alone(platform: str) -> None:
    """Each row of a batch that uses everything is what it is alone."""
    requests = [SamplingParams(1.0, seed=3), *(SamplingParams(**edit) for edit in EDITS.values())]
    requests += [SamplingParams(allowed_ids=[4, 200]), SamplingParams(min_tokens=50, logprobs=3)]
    requests += [SamplingParams(0.7, top_k=9, seed=8, logit_bias={4: 100, 5: 100})]
    logits = RNG.normal(0, 3, (len(requests), V)).astype(np.float32)
    ends = [int(logits[8].argmax())]
    together = pick(platform, logits, requests, end_ids=ends)
    for row, request in enumerate(requests):
        alone = pick(platform, logits[row], [request], end_ids=ends)
        assert alone.tokens[0] == together.tokens[row]
        assert alone.top_ids[0].tolist() == together.top_ids[row].tolist()
        np.testing.assert_allclose(alone.logprobs[0], together.logprobs[row], atol=2e-6)


def test_end_tokens_wait_for_min_tokens(platform: str) -> None:
    """With ends 7 and 9 most likely, none is chosen before; a user's stop id is."""
    logits = LOGITS.copy()
    logits[[7, 9, 3]] = [50, 40, 30]
    lengths = [4, 5, 13, 14, 15]  # tokens before this one, 4 of them the prompt

    def tokens(**options) -> list[int]:
        requests = [SamplingParams(min_tokens=10, **options)] * 5
        chosen = pick(platform, logits, requests, end_ids=[9, 7], positions=lengths, reply=[1] * 11)
        return chosen.tokens.tolist()

    assert tokens() == [3, 3, 3, 7, 7]
    assert tokens(ignore_eos=True) == [3, 3, 3, 7, 7]
    assert tokens(stop_ids=[3]) == [3, 3, 3, 7, 7]
    assert tokens(stop_ids=[9]) == [9, 9, 9, 7, 7]
    # Where nothing else may be generated, the end may.
    assert tokens(allowed_ids=[7, 9]) == [7] * 5
    assert tokens(allowed_ids=[7, 5]) == [5, 5, 5, 7, 7]


@pytest.mark.parametrize("width", [16, 31, 33])
def test_tiny_vocabularies(platform: str, width: int) -> None:
    logits = LOGITS[:width]
    last = width - 1
    assert pick(platform, logits, [SamplingParams(allowed_ids=[last])], reply=[]).tokens == [last]
    rows = [SamplingParams(1.0, top_k=10**9, seed=s, logit_bias={last: 20}) for s in range(50)]
    assert last in pick(platform, logits, rows, prompt=[1], reply=[2]).tokens
    # All of the vocabulary are ends: then these may be generated.
    held = SamplingParams(min_tokens=9)
    chosen = pick(platform, logits[:16], [held], end_ids=range(16), prompt=[1], reply=[])
    assert chosen.tokens.tolist() == [logits[:16].argmax()]


def test_logprobs_are_the_models_own(platform: str) -> None:
    """The same whatever the temperature, filters, bans and penalties; the best ones too."""
    wide = LOGITS.astype(np.float64)
    raw = wide - np.log(np.exp(wide).sum())
    best = np.argsort(-raw)[:20]
    requests = [
        SamplingParams(logprobs=20),
        SamplingParams(1.0, seed=5, logprobs=20),
        SamplingParams(5.0, seed=6, logprobs=5, top_p=0.5, presence_penalty=2.0),
        SamplingParams(logprobs=20, logit_bias={int(best[0]): -100}, repetition_penalty=2.0),
        SamplingParams(logprobs=0),
        SamplingParams(),
    ]
    chosen = pick(platform, LOGITS, requests)
    np.testing.assert_allclose(chosen.logprobs, raw[chosen.tokens], atol=1e-5)
    assert chosen.finite.all()
    assert chosen.tokens[3] != best[0]
    for row in range(4):
        assert chosen.top_ids[row].tolist() == best.tolist()
        np.testing.assert_allclose(chosen.top_logprobs[row], raw[best], atol=1e-5)
    assert (chosen.top_ids[4:] == -1).all() and np.isneginf(chosen.top_logprobs[4:]).all()


def test_all_logprobs_of_a_small_vocabulary_are_whole(platform: str) -> None:
    chosen = pick(platform, LOGITS[:16], [SamplingParams(logprobs=20)], prompt=[], reply=[])
    assert abs(np.exp(chosen.top_logprobs).sum() - 1) < 1e-5
    assert sorted(chosen.top_ids[0, :16].tolist()) == list(range(16))
    assert (chosen.top_ids[0, 16:] == -1).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_rows_that_mean_nothing_are_marked(platform: str, bad: float) -> None:
    logits = np.tile(LOGITS, (3, 1))
    logits[1, 13] = bad
    for options in ({}, {"temperature": 1.0}, {"top_k": 3, "temperature": 1.0}, EDITS["all"]):
        requests = [SamplingParams(seed=4, logprobs=2, **options)] * 3
        chosen = pick(platform, logits, requests)
        assert chosen.finite.tolist() == [True, False, True]
        assert ((chosen.tokens >= 0) & (chosen.tokens < V)).all()
        alone = pick(platform, LOGITS, requests[:1])
        assert chosen.tokens[[0, 2]].tolist() == alone.tokens.tolist() * 2
        assert np.isfinite(chosen.logprobs[[0, 2]]).all()


@pytest.mark.parametrize("temperature", [0, 1e-12, 1e-6, 1e-4])
def test_tiny_temperatures_take_the_best(platform: str, temperature: float) -> None:
    requests = [SamplingParams(temperature, seed=seed) for seed in range(20)]
    assert set(pick(platform, LOGITS, requests).tokens.tolist()) == {int(LOGITS.argmax())}


def test_a_top_k_of_one_is_greedy(platform: str) -> None:
    logits = np.array([0, 2, 2, 1.9], np.float32)  # even where two are the best
    for narrow in ({"top_k": 1}, {"top_p": 0.0}, {"min_p": 1.0}):
        requests = [SamplingParams(5.0, seed=seed, **narrow) for seed in range(20)]
        assert set(pick(platform, logits, requests, prompt=[], reply=[]).tokens.tolist()) == {1}


def test_seeds_and_positions_decide_alone(platform: str) -> None:
    """Neither neighbours nor batch size count; other seeds and places draw other tokens."""
    flat = RNG.normal(0, 0.5, V).astype(np.float32)
    hot = SamplingParams(1.0, seed=2**40 + 1)
    alone = pick(platform, flat, [hot], positions=[17]).tokens[0]
    for rows in (8, 64):
        others = [SamplingParams(1.0, seed=seed, top_k=1 + seed % 3 * 40) for seed in range(rows)]
        others[5] = hot
        assert pick(platform, flat, others, positions=[17] * rows).tokens[5] == alone
    seeds = [hot, *(SamplingParams(1.0, seed=s) for s in (0, 1, 2, 2**32, 2**33, 2**62))]
    assert len(set(pick(platform, flat, seeds, positions=[17] * 7).tokens.tolist())) > 4
    assert len(set(pick(platform, flat, [hot] * 8, positions=range(8)).tokens.tolist())) > 4


def test_choices_of_one_request_differ(platform: str) -> None:
    """Thirty tokens of n=4 with a seed: four texts, and the same four again."""
    flat = RNG.normal(0, 0.5, V).astype(np.float32)
    params = SamplingParams(1.0, seed=1, n=4)

    def texts() -> list[tuple[int, ...]]:
        return [
            tuple(pick(platform, flat, [params.child(i)] * 30, positions=range(30)).tokens)
            for i in range(4)
        ]

    assert len(set(texts())) == 4
    assert texts() == texts()
    fresh = [SamplingParams(1.0)] * 10
    runs = {tuple(pick(platform, flat, fresh, positions=[9] * 10).tokens) for _ in range(10)}
    assert len(runs) == 10
