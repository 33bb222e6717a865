"""Keeps an engine under load for minutes, with aborts, and watches memory, latency and compiles.

    python scripts/soak.py --minutes=10

Prints a line for each tenth of the time. Exits with 1 if memory or latency grew, a step failed, a
page leaked, or anything was compiled late.
"""

from __future__ import annotations

import re
import statistics
import sys
import time
from pathlib import Path

import numpy as np
from absl import app, flags

from stoker import Engine, SamplingParams, load_model

FLAGS = flags.FLAGS
flags.DEFINE_string("model", "smollm2-135m", "Alias or path.")
flags.DEFINE_float("minutes", 10.0, "How long.", lower_bound=0.1)
flags.DEFINE_integer("slots", 16, "Sequences that run at once.", lower_bound=1)
flags.DEFINE_integer("pages", 48, "Pages of the cache: few, so that some are lost to others.")
PERIODS = 10
#: Growth from the second period to the last that is noise: bytes, and a share of the latency.
MEMORY_NOISE, LATENCY_NOISE = 30e6, 0.35


def resident_bytes() -> int:
    """Bytes of memory that the process holds."""
    found = re.search(r"VmRSS:\s+(\d+)", Path("/proc/self/status").read_text())
    assert found
    return int(found[1]) * 1024


def random_request(rng: np.random.Generator, vocabulary: int, shared: list[int]) -> tuple:
    """A prompt, which may begin as others do, and how to go on from it."""
    prompt = rng.integers(0, vocabulary, rng.integers(1, 200)).tolist()
    if rng.random() < 0.4:
        prompt = shared + prompt
    params = SamplingParams(
        max_tokens=int(rng.integers(1, 80)),
        temperature=float(rng.choice([0.0, 0.8])),
        top_p=0.95,
        top_k=int(rng.integers(0, 100)),
        frequency_penalty=float(rng.choice([0.0, 0.5])),
        logprobs=int(rng.integers(0, 5)) if rng.random() < 0.2 else None,
        stop=("e",) if rng.random() < 0.2 else (),
        n=int(rng.choice([1, 1, 1, 2])),
    )
    return prompt, params


def main(_: list[str]) -> None:
    """Runs the load."""
    model = load_model(FLAGS.model)
    engine = Engine(model, slots=FLAGS.slots, context=512, pages=FLAGS.pages)
    print(engine)
    engine.warmup()
    rng = np.random.default_rng(0)
    shared = rng.integers(0, model.config.vocab_size, 100).tolist()
    memory, latency, open_ids = [], [], []
    start = time.perf_counter()
    for period in range(PERIODS):
        waits, end = [], start + (period + 1) * FLAGS.minutes * 60 / PERIODS
        done = 0
        while time.perf_counter() < end:
            while engine.unfinished < FLAGS.slots * 3 // 2:
                prompt, params = random_request(rng, model.config.vocab_size, shared)
                open_ids.append(engine.add(prompt, params).id)
            if rng.random() < 0.01:
                engine.abort(open_ids[rng.integers(len(open_ids))])
            before = time.perf_counter()
            finished = {d.reply.id for d in engine.step() if d.finished and d.reply.done}
            waits.append(time.perf_counter() - before)
            done += len(finished)
            open_ids = [name for name in open_ids if name not in finished]
        memory.append(resident_bytes())
        latency.append(statistics.median(waits))
        print(
            f"{(period + 1) * FLAGS.minutes / PERIODS:5.1f} min  {memory[-1] / 1e6:7.1f} MB  "
            f"step {latency[-1] * 1e3:6.2f} ms (p99 {np.percentile(waits, 99) * 1e3:6.1f})  "
            f"{done} requests  {engine.stats.preemptions} preemptions  "
            f"{engine.runner.programs.late} late compilations",
            flush=True,
        )
    while engine.unfinished:
        engine.step()
    print(engine.stats)
    faults = {
        "memory grew": memory[-1] - memory[1] > MEMORY_NOISE,
        "steps got slower": latency[-1] > latency[1] * (1 + LATENCY_NOISE),
        "programs were compiled late": engine.runner.programs.late > 0,
        "steps failed": engine.stats.failures > 0,
        "pages leaked": engine.pages.used > 0,
    }
    if any(faults.values()):
        sys.exit("; ".join(fault for fault, happened in faults.items() if happened))


if __name__ == "__main__":
    app.run(main)
