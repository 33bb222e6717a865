"""What a step costs the host of process 0 where several processes share a model.

    python scripts/host_cost.py --processes=4 --batch=32

Starts so many processes of one CPU device each on this machine, on a random model of many layers
but little work, lets it decode, and prints what each step takes, in microseconds: planning and
making arrays, telling the other processes, giving the device its work. One process tells nobody.
Of all steps the fastest tenth's slowest is shown, so that other work on the machine counts little.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

LAYERS, CONTEXT = 30, 2048


class Stopwatch:
    """Seconds spent in functions, call by call."""

    def __init__(self) -> None:
        self.spent: dict[str, list[float]] = {}

    def put_on(self, owner: Any, method: str, name: str) -> None:
        """Times a method of one object."""
        inner: Callable[..., Any] = getattr(owner, method)
        times = self.spent.setdefault(name, [])

        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return inner(*args, **kwargs)
            finally:
                times.append(time.perf_counter() - start)

        setattr(owner, method, timed)

    def low_us(self, name: str) -> float:
        """The time that nine of ten calls exceed, in microseconds: others' work left out."""
        return _low(self.spent.get(name) or [0.0, 0.0]) * 1e6


def _low(times: list[float]) -> float:
    return statistics.quantiles(times, n=10)[0]


def measure(team: Any, model: Any, batch: int, steps: int, mesh: str) -> None:
    """Decodes with `batch` sequences, and prints what the host's work took."""
    from stoker.engine.engine import Engine
    from stoker.engine.hosts import dismiss
    from stoker.engine.sampling_params import SamplingParams
    from stoker.engine.shapes import Shapes
    from stoker.sharding import frames

    shapes = Shapes(decode=(batch,), rows=(64,), sequences=(batch,), score=16)
    engine = Engine(model, slots=batch, context=CONTEXT, shapes=shapes)
    params = SamplingParams(max_tokens=steps + 50, ignore_eos=True)
    replies = [engine.add([1, 2, 3, 4], params) for _ in range(batch)]
    while not all(reply.ids for reply in replies):
        engine.step()
    watch = Stopwatch()
    watch.put_on(engine._parts, "plan", "plan")
    watch.put_on(engine.runner, "dispatch", "all")
    watch.put_on(engine.runner.programs, "decode", "dispatch")
    watch.put_on(engine.runner, "read", "read")
    sent: list[int] = []
    if team is not None:
        watch.put_on(team, "send", "tell")
        plain = frames.encode
        frames.encode = lambda frame: sent.append(len(plain(frame))) or plain(frame)
    whole = []
    for _ in range(steps):
        start = time.perf_counter()
        engine.step()
        whole.append(time.perf_counter() - start)
    tell, dispatch = watch.low_us("tell"), watch.low_us("dispatch")
    plan = watch.low_us("plan") + watch.low_us("all") - tell - dispatch
    print(
        f"{mesh or 'no mesh':>10}  B {batch:3}  plan {plan:6.0f}  tell {tell:5.0f} "
        f"({statistics.median(sent or [0]):.0f} bytes)  dispatch {dispatch:6.0f}  "
        f"read {watch.low_us('read'):7.0f}  whole step {_low(whole) * 1e6:7.0f} us",
        flush=True,
    )
    if team is not None:
        dismiss(team)


def work(address: str, count: int, index: int, batch: int, steps: int) -> None:
    """One process."""
    from stoker.sharding import join, make_mesh

    team = join(address, count, index, timeout_s=120) if count > 1 else None
    import jax

    from stoker.engine.hosts import follow
    from stoker.models.config import Kernels, ModelConfig, Rope
    from stoker.models.loading import Model
    from stoker.models.parameters import init_params
    from stoker.models.placing.placed_model import place_model

    config = ModelConfig(
        family="llama",
        vocab_size=512,
        d_model=64,
        n_layers=LAYERS,
        n_heads=8,
        n_kv_heads=4,
        head_dim=8,
        d_ff=128,
        max_positions=CONTEXT,
        norm_eps=1e-5,
        rope=Rope(theta=1e4, dims=8),
        kernels=Kernels("cpu", "float32"),
    )
    from pathlib import Path

    params = init_params(config, jax.random.key(0))
    model = Model("random", Path(), config, params, None, 0, None)
    mesh = f"tensor:{count}" if count > 1 else ""
    if team is not None:
        model = place_model(model, make_mesh({"tensor": count}))
        if not team.hosts.leads:
            follow(model, team)
            team.leave()
            return
        model = dataclasses.replace(model, team=team)
    measure(team, model, batch, steps, mesh)
    if team is not None:
        team.leave()


def main() -> None:
    """Starts the processes and waits for them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--address", default="")
    parser.add_argument("--index", type=int, default=-1)
    given = parser.parse_args()
    if given.index >= 0:
        work(given.address, given.processes, given.index, given.batch, given.steps)
        return
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    own = [f"--{name}={value}" for name, value in vars(given).items() if name != "index"]
    own = [flag for flag in own if not flag.startswith("--address")]
    jobs = [
        subprocess.Popen(
            [sys.executable, __file__, *own, f"--address={address}", f"--index={index}"],
            env=os.environ,
        )
        for index in range(given.processes)
    ]
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(max(job.wait() for job in jobs))


if __name__ == "__main__":
    main()
