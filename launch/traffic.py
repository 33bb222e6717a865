"""`stoker bench --trace` and `--rate`: requests that arrive over time."""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

import numpy as np
from absl import flags
from rich.console import Console
from rich.table import Table

from ..engine.engine import Engine
from ..engine.trace import Arrival, Replay, parse_trace, poisson_trace, replay
from ..models.errors import StokerError
from ..models.loading import Model
from .common import count_bar, read_text

_PERCENTILES = (50, 90, 99)


def define_flags(values: flags.FlagValues) -> None:
    """What arrives, and what kind of engine it meets."""
    flags.DEFINE_string(
        "trace",
        None,
        "Replay arrivals instead: a JSON list of objects with at (seconds), prompt_len, gen_len "
        "and, if prompts begin alike, shared_len and group.",
        flag_values=values,
    )
    flags.DEFINE_float(
        "rate",
        None,
        "Replay arrivals at random instead, so many in an average second, of about --prompt_len "
        "and --gen_len tokens; inf for all at once.",
        lower_bound=0.0,
        flag_values=values,
    )
    flags.DEFINE_integer("requests", 64, "Requests of --rate.", lower_bound=1, flag_values=values)
    flags.DEFINE_integer(
        "shared_len",
        0,
        "Tokens that all prompts of --rate begin with, before those of --prompt_len.",
        lower_bound=0,
        flag_values=values,
    )
    flags.DEFINE_integer(
        "slots", 32, "Sequences of a replay that run at once.", lower_bound=1, flag_values=values
    )
    flags.DEFINE_boolean(
        "prefix_cache",
        True,
        "A replay keeps pages for prompts that begin alike.",
        flag_values=values,
    )
    flags.DEFINE_boolean(
        "mixed",
        True,
        "Steps of a replay run prompts and running replies together; with --nomixed, in turn.",
        flag_values=values,
    )


def read_trace(values: flags.FlagValues) -> list[Arrival] | None:
    """The arrivals that the flags describe; None if there are none to replay."""
    if values.trace is not None and values.rate is not None:
        raise StokerError("--trace and --rate both say what arrives; give one of them")
    if values.trace is not None:
        try:
            return parse_trace(read_text("trace", values.trace))
        except StokerError as error:
            raise StokerError(f"--trace={values.trace}: {error}") from None
    if values.rate is None:
        return None
    if not values.rate > 0:
        raise StokerError(f"--rate={values.rate}: requests must arrive; give more than 0")
    return poisson_trace(
        values.rate,
        values.requests,
        values.prompt_len,
        values.gen_len,
        shared_len=values.shared_len,
    )


def measure(values: flags.FlagValues, model: Model, trace: list[Arrival]) -> dict[str, Any]:
    """Replays, prints what people want to know, and returns all of it."""
    engine = Engine(
        dataclasses.replace(model, tokenizer=None),
        slots=values.slots,
        context=max(arrival.prompt_len + arrival.gen_len for arrival in trace),
        step_tokens=max(values.step_tokens, values.slots + 1),
        prefix_cache=values.prefix_cache,
        decode_steps=values.decode_steps,
        mixed=values.mixed,
    )
    print(engine, file=sys.stderr)
    with count_bar() as bar:
        task = bar.add_task("compiling")
        engine.warmup(advance=lambda done, total: bar.update(task, completed=done, total=total))
        task = bar.add_task("replaying")
        result = replay(
            engine,
            trace,
            advance=lambda done, total: bar.update(task, completed=done, total=total),
        )
    report = _report(model, engine, result)
    _print(report)
    return report


def _report(model: Model, engine: Engine, result: Replay) -> dict[str, Any]:
    """All figures, as JSON takes them."""
    stats = dataclasses.asdict(engine.stats)
    prompt = sum(len(reply.prompt_ids) for reply in result.replies)
    cached = sum(reply.cached_tokens for reply in result.replies)
    return {
        "model": model.name,
        "requests": len(result.replies),
        "seconds": result.seconds,
        "generated_tok_s": result.generated_tok_s,
        "prompt_tokens": prompt,
        "cached_tokens": cached,
        "cached_kv_bytes": cached * engine.runner.token_bytes,
        "moved_bytes": engine.stats.weight_bytes + engine.stats.kv_bytes,
        "occupancy": result.occupancy,
        "host_share": result.host_share,
        "padding_share": engine.stats.padding_share,
        "late_compilations": engine.runner.programs.late,
        "ttft_s": _percentiles(result.ttft_s()),
        "tpot_s": _percentiles(result.tpot_s()),
        "queue_s": _percentiles(result.queue_s()),
        "stats": stats,
    }


def _percentiles(values: np.ndarray) -> dict[str, float]:
    return {f"p{p}": float(np.percentile(values, p)) for p in _PERCENTILES} | {
        "mean": float(values.mean())
    }


def _print(report: dict[str, Any]) -> None:
    table = Table(box=None, padding=(0, 2, 0, 0))
    for heading in ("ms", "mean", *(f"p{p}" for p in _PERCENTILES)):
        table.add_column(heading, justify="left" if heading == "ms" else "right")
    names = {"queue_s": "queue", "ttft_s": "first token", "tpot_s": "per token after"}
    for key, name in names.items():
        row = report[key]
        table.add_row(name, *(f"{row[of] * 1e3:.1f}" for of in ("mean", "p50", "p90", "p99")))
    Console().print(table)
    facts = (
        f"{report['requests']} requests in {report['seconds']:.2f} s",
        f"{report['generated_tok_s']:.1f} tok/s generated",
        f"{report['cached_tokens']} of {report['prompt_tokens']} prompt tokens cached",
        f"{report['moved_bytes'] / 1e9:.1f} GB moved",
        f"{report['occupancy']:.1f} sequences per step",
        f"{report['padding_share']:.0%} padding",
        f"host {report['host_share']:.0%}",
        f"{report['stats']['preemptions']} preemptions",
        f"{report['late_compilations']} late compilations",
    )
    print("; ".join(facts))
