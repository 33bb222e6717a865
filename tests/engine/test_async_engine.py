"""The asyncio front: streams, cancellation, and what becomes of tasks when the engine ends."""

from __future__ import annotations

import asyncio
import contextlib

import pytest
from chain import chain_model, tokenizer

from stoker.engine.async_engine import AsyncEngine
from stoker.engine.engine import Engine
from stoker.engine.sampling_params import SamplingParams
from stoker.models.errors import StokerError

TEXT = "abcdefghijklmnop"


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine(chain_model(TEXT), slots=3, context=128, step_tokens=16)


def ids(text: str) -> list[int]:
    return tokenizer().encode(text)


def test_many_tasks_stream_at_once(engine: Engine) -> None:
    async def one(front: AsyncEngine, start: int) -> str:
        pieces = [d.text async for d in front.stream(ids(TEXT[: start + 1]))]
        return "".join(pieces)

    async def run() -> list[str]:
        async with AsyncEngine(engine) as front:
            assert front.healthy
            return await asyncio.gather(*(one(front, start) for start in range(12)))

    assert asyncio.run(run()) == [TEXT[start + 1 :] for start in range(12)]
    assert engine.pages.used == 0


def test_a_stream_that_is_left_or_cancelled_ends_its_request(engine: Engine) -> None:
    forever = SamplingParams(ignore_eos=True)

    async def run() -> None:
        async with AsyncEngine(engine) as front:
            stream = front.stream(ids("a"), forever)
            async for _ in stream:
                break
            await stream.aclose()
            task = asyncio.create_task(front.generate(ids("b"), forever))
            other = asyncio.create_task(front.generate(ids("c")))
            await asyncio.sleep(0)
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
            assert (await other).text == TEXT[3:]
            # Whatever was left is gone: the next reply finds an engine with nothing else to do.
            assert (await front.generate(ids("o"))).text == "p"
            assert engine.unfinished == 0

    asyncio.run(run())


def test_bad_requests_raise_where_they_are_made(engine: Engine) -> None:
    async def run() -> None:
        async with AsyncEngine(engine) as front:
            with pytest.raises(StokerError, match="prompt is empty"):
                await front.generate([])
            stream = front.stream(ids("a"), SamplingParams(ignore_eos=True), request_id="x")
            await anext(stream)
            with pytest.raises(StokerError, match="'x' is under way"):
                await anext(front.stream(ids("a"), request_id="x"))
            assert (await anext(stream)).ids
            await stream.aclose()
            assert (await front.generate("n")).text == "op"

    asyncio.run(run())


def test_several_choices_all_arrive(engine: Engine) -> None:
    params = SamplingParams(n=3, temperature=0.5, seed=1)

    async def run() -> list[int]:
        async with AsyncEngine(engine) as front:
            return [d.choice.index async for d in front.stream(ids("m"), params) if d.finished]

    assert sorted(asyncio.run(run())) == [0, 1, 2]


def test_scoring_one_token_waits_for_nobody(engine: Engine) -> None:
    params = SamplingParams(max_tokens=0, prompt_logprobs=0)

    async def run() -> None:
        async with AsyncEngine(engine) as front:
            reply = await asyncio.wait_for(front.generate(ids("a"), params), timeout=20)
            assert reply.prompt_logprobs == [None]

    asyncio.run(run())


def test_closing_ends_what_is_under_way(engine: Engine) -> None:
    async def run() -> None:
        async with AsyncEngine(engine) as front:
            stream = front.stream(ids("a"), SamplingParams(ignore_eos=True))
            await anext(stream)
            await front.close()
            with pytest.raises(StokerError, match="engine stopped"):
                async for _ in stream:
                    pass
            assert not front.healthy
            with pytest.raises(StokerError, match="does not run"):
                await front.generate(ids("a"))

    asyncio.run(run())


def test_a_thread_that_breaks_down_tells_everyone(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SRV-08: nobody is left hanging, and the front says that it is not well."""

    async def run() -> None:
        async with AsyncEngine(engine) as front:
            assert (await front.generate(ids("n"))).text == "op"

            def broken() -> None:
                raise MemoryError("no more")

            monkeypatch.setattr(engine, "step", broken)
            with pytest.raises(StokerError, match="engine stopped: no more"):
                await front.generate(ids("a"))
            assert not front.healthy
            assert isinstance(front.error, MemoryError)

    asyncio.run(run())
    monkeypatch.undo()
