"""Thousands of random requests on a tiny pool of pages: every reply is what it would be alone."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from gguf_files import byte_vocabulary
from tiny import random_params, tiny_model, variant

from stoker.engine.engine import Engine
from stoker.engine.replies import Reply
from stoker.engine.sampling_params import SamplingParams
from stoker.engine.shapes import Shapes
from stoker.models.loading import Model
from stoker.models.tokenizers import tokenizer_from_gguf

CONTEXT = 96
REQUESTS = 2000
KINDS = 250


@pytest.fixture(scope="module")
def model() -> Model:
    config = variant("plain", "cpu")
    keys = byte_vocabulary(config.vocab_size) | {"tokenizer.ggml.eos_token_id": 1}
    return tiny_model(config, random_params(config), tokenizer_from_gguf(keys))


@dataclasses.dataclass(frozen=True)
class Kind:
    prompt: tuple[int, ...]
    params: SamplingParams


def kinds(rng: np.random.Generator) -> list[Kind]:
    """Prompts of which many begin alike, and every way of generating."""
    prefixes = [rng.integers(2, 512, n).tolist() for n in (16, 33, 50)]
    found = []
    for _ in range(KINDS):
        prompt = rng.integers(2, 512, rng.integers(1, 25)).tolist()
        if rng.random() < 0.5:
            prompt = prefixes[rng.integers(3)] + prompt[: rng.integers(0, 20)]
        seeded = rng.random() < 0.5
        params = SamplingParams(
            max_tokens=int(rng.integers(1, 45)),
            temperature=float(seeded),
            top_p=float(rng.choice([1.0, 0.9])),
            seed=int(rng.integers(10_000)),
            n=int(rng.choice([1, 1, 1, 2, 3])) if seeded else 1,
            stop=("e", "th") if rng.random() < 0.2 else (),
            stop_ids=tuple(rng.integers(0, 512, 20).tolist()) if rng.random() < 0.3 else (),
            ignore_eos=bool(rng.random() < 0.2),
            frequency_penalty=float(rng.choice([0.0, 0.0, 0.8])),
            logprobs=int(rng.integers(0, 4)) if rng.random() < 0.2 else None,
            prompt_logprobs=1 if rng.random() < 0.1 else None,
        )
        found.append(Kind(tuple(prompt), params))
    return found


def summary(reply: Reply) -> list[object]:
    """All of a reply that must not depend on what else goes on."""
    choices = [
        (c.ids, c.logprobs, c.alternatives, c.text, c.finish_reason, c.stop) for c in reply.choices
    ]
    return [choices, reply.prompt_logprobs, reply.prompt_alternatives]


def test_every_reply_is_what_it_would_be_alone(model: Model) -> None:
    rng = np.random.default_rng(2024)
    shapes = Shapes(decode=(1,), rows=(96,), sequences=(1,), score=64)
    alone = Engine(model, slots=1, context=CONTEXT, prefix_cache=False, shapes=shapes)
    pool = kinds(rng)
    expected = [summary(alone.generate([k.prompt], k.params)[0]) for k in pool]

    engine = Engine(model, slots=6, context=CONTEXT, pages=8, step_tokens=24, decode_steps=2)
    waiting = list(rng.integers(0, KINDS, REQUESTS))
    under_way: dict[str, tuple[int, Reply]] = {}
    deltas_text: dict[tuple[str, int], str] = {}
    aborted = completed = 0
    while waiting or engine.unfinished:
        # Bursts, and pauses in which everything drains.
        while waiting and engine.unfinished < rng.integers(0, 14):
            kind = int(waiting.pop())
            reply = engine.add(
                pool[kind].prompt,
                pool[kind].params,
                priority=int(rng.integers(0, 3)),
                salt=int(rng.integers(0, 2)),
            )
            under_way[reply.id] = (kind, reply)
        if under_way and rng.random() < 0.03:
            victim = str(rng.choice(list(under_way)))
            engine.abort(victim)
        for delta in engine.step():
            key = (delta.reply.id, delta.choice.index)
            deltas_text[key] = deltas_text.get(key, "") + delta.text
        engine.pages.check([s.pages for s in engine._parts.running])
        for name in [name for name, (_, reply) in under_way.items() if reply.done]:
            kind, reply = under_way.pop(name)
            for choice in reply.choices:
                assert deltas_text.pop((name, choice.index), "") == choice.text
            if any(choice.finish_reason == "abort" for choice in reply.choices):
                aborted += 1
            else:
                completed += 1
                assert summary(reply) == expected[kind]
    assert completed + aborted == REQUESTS
    assert aborted > 20
    assert engine.stats.preemptions > 50
    assert engine.stats.cached_tokens > 1000
    assert engine.pages.used == 0
    assert engine.pages.free + engine.pages.cached == 8
    # Metrics reconcile (SRV-13).
    assert "error" not in engine.stats.finished
    assert sum(engine.stats.finished.values()) >= REQUESTS
