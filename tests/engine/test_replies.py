"""Where a reply ends, and what its text is, on a model whose text is known in advance."""

from __future__ import annotations

import pytest
from chain import chain_model, tokenizer

from stoker.engine.engine import Engine
from stoker.engine.sampling_params import SamplingParams

TEXT = "abcdefghijklmnop"


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine(chain_model(TEXT), slots=4, context=64, step_tokens=16)


def reply(engine: Engine, prompt: str = "a", **options: object):
    ids = tokenizer().encode(prompt)
    return engine.generate([ids], SamplingParams(**options))[0]


def test_the_chain_is_as_foretold(engine: Engine) -> None:
    """The end token counts, and shows no text."""
    whole = reply(engine)
    assert (whole.text, whole.finish_reason) == (TEXT[1:], "stop")
    assert whole.ids == [*tokenizer().encode(TEXT[1:]), 1]
    assert whole.choices[0].stop is None


@pytest.mark.parametrize(
    ("stop", "text", "met"),
    [
        (("e",), "bcd", "e"),
        (("efg",), "bcd", "efg"),
        (("fgx", "fg"), "bcde", "fg"),
        (("ghi", "fghi"), "bcde", "fghi"),
        (("zz", "op"), "bcdefghijklmn", "op"),
        (("qq",), TEXT[1:], None),
    ],
)
def test_stop_strings_cut_exactly(
    engine: Engine, stop: tuple[str, ...], text: str, met: str | None
) -> None:
    found = reply(engine, stop=stop)
    assert (found.text, found.finish_reason, found.choices[0].stop) == (text, "stop", met)


def test_only_what_may_become_a_stop_is_held_back(engine: Engine) -> None:
    pieces = [d.text for d in engine.stream(tokenizer().encode("a"), SamplingParams(stop=("dex",)))]
    # "de" might have become "dex": it comes with the f.
    assert pieces[:5] == ["b", "c", "", "", "def"]
    assert "".join(pieces) == TEXT[1:]


def test_stop_ids_end_the_reply(engine: Engine) -> None:
    five = tokenizer().encode("f")[0]
    found = reply(engine, stop_ids=(five,))
    assert (found.text, found.finish_reason, found.choices[0].stop) == ("bcde", "stop", five)
    assert found.ids[-1] == five


def test_limits_end_the_reply(engine: Engine) -> None:
    found = reply(engine, max_tokens=3)
    assert (found.text, found.finish_reason) == ("bcd", "length")
    # A stop that comes with the last token is a stop.
    found = reply(engine, max_tokens=3, stop=("d",))
    assert (found.text, found.finish_reason) == ("bc", "stop")


def test_ignoring_end_tokens_ignores_all_of_them_and_no_stop(engine: Engine) -> None:
    """LEN-03: the end token repeats itself once it is reached."""
    found = reply(engine, ignore_eos=True, max_tokens=20)
    assert (len(found.ids), found.finish_reason) == (20, "length")
    assert found.ids[-5:] == [1] * 5
    assert found.text == TEXT[1:]
    found = reply(engine, ignore_eos=True, max_tokens=20, stop=("k",))
    assert (found.text, found.finish_reason) == ("bcdefghij", "stop")


def test_no_end_token_comes_before_min_tokens(engine: Engine) -> None:
    """LEN-03: stop ids and strings of the caller's own end the reply all the same."""
    found = reply(engine, prompt="n", min_tokens=10, max_tokens=20)
    assert 1 not in found.ids[:10]
    assert len(found.ids) > 10
    early = reply(engine, prompt="n", min_tokens=10, max_tokens=20, stop=("p",))
    assert (early.text, early.finish_reason) == ("o", "stop")


def test_biases_reach_their_request_only(engine: Engine) -> None:
    """SMP-05."""
    seven = tokenizer().encode("7")[0]
    prompts = [tokenizer().encode("a")] * 3
    params = [
        SamplingParams(max_tokens=6),
        SamplingParams(max_tokens=6, logit_bias={str(seven): 100}),
        SamplingParams(max_tokens=6, logit_bias={tokenizer().encode("c")[0]: -100}),
    ]
    plain, forced, banned = engine.generate(prompts, params)
    assert plain.text == "bcdefg"
    assert forced.ids == [seven] * 6
    assert "c" not in banned.text and banned.text[0] == "b"


def test_alternatives_come_with_the_tokens(engine: Engine) -> None:
    found = reply(engine, max_tokens=4, logprobs=2).choices[0]
    for token, logprob, beside in zip(found.ids, found.logprobs, found.alternatives, strict=True):
        assert len(beside) == 2
        assert beside[0] == (token, logprob)
    assert reply(engine, max_tokens=4, logprobs=0).choices[0].alternatives == [()] * 4
    assert reply(engine, max_tokens=4).choices[0].alternatives == []
