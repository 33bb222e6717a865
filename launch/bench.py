"""`stoker bench`: speed of prefill and decode, beside what the hardware allows."""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from absl import flags
from rich.console import Console
from rich.table import Table

from ..engine.accounting import arithmetic_peak, memory_bandwidth, peak_memory
from ..engine.benchmark import Bench, Measurement
from ..models.config import Kernels
from ..models.errors import StokerError
from ..models.loading import Model, choose_kernels, choose_numerics
from ..models.parameters import count_bytes
from ..models.placing.placed_model import place_model
from ..models.random_weights import WEIGHTS, architecture, random_weights
from . import common, traffic
from .command import Command
from .meshes import devices_at_once, given_mesh, mesh_lines


def define_flags(values: flags.FlagValues) -> None:
    """The flags of this command."""
    common.define_model_flags(values, context=False, stats=False, keep_programs=False)

    def integer(name: str, default: int, text: str) -> None:
        flags.DEFINE_integer(name, default, text, lower_bound=1, flag_values=values)

    flags.DEFINE_list(
        "batch", ["1", "8", "32"], "Sequences decoded at once: a list.", flag_values=values
    )
    integer("prompt_len", 64, "Tokens of each prompt before decoding.")
    integer("gen_len", 64, "Tokens to generate, at least 2; the first comes from prefill.")
    integer("prefill_len", 512, "Tokens of the prompt whose prefill is measured.")
    integer("repeats", 3, "Measured runs, after one to warm up; medians are reported.")
    integer("step_tokens", 256, "Most tokens that one step runs: the size of prefill chunks.")
    integer("decode_steps", 1, "Decode steps that the device takes at once.")
    traffic.define_flags(values)
    flags.DEFINE_string("json", None, "File to write all figures to.", flag_values=values)
    flags.DEFINE_string(
        "random_weights",
        None,
        "Measure an architecture by shape, without a checkpoint: a name of "
        "configs/architectures.toml, or a .toml file of your own. Takes the place of --model.",
        flag_values=values,
    )
    flags.DEFINE_enum("weights", "int4", WEIGHTS, "Format of --random_weights.", flag_values=values)


def run(values: flags.FlagValues, load: Callable[[], Model]) -> None:
    """Measures and reports."""
    batches = _batches(values.batch)
    if values.gen_len < 2:
        raise StokerError("--gen_len=1 leaves no decode step to measure; give at least 2")
    if values.json is not None:
        _check_writable(values.json)
    if values["weights"].present and values.random_weights is None:
        raise StokerError("--weights is the format of --random_weights; give that too")
    if values.quantize is not None and values.random_weights is not None:
        raise StokerError("--quantize is for a checkpoint; --weights is what random ones have")
    trace = traffic.read_trace(values)
    model = load()
    if trace is not None:
        report = traffic.measure(values, model, trace)
    else:
        report = _measure(values, model, batches)
    if values.json is not None:
        Path(values.json).write_text(json.dumps(report, indent=1) + "\n")


def _measure(values: flags.FlagValues, model: Model, batches: list[int]) -> dict[str, Any]:
    """Prefill, and decode at each batch size."""
    limit = model.config.max_positions
    longest = max(values.prompt_len + values.gen_len, values.prefill_len)
    if longest > limit:
        raise StokerError(f"sequences of {longest} tokens: this model takes at most {limit}")
    total = (len(batches) + 1) * (values.repeats + 1)
    with common.count_bar() as bar:
        task = bar.add_task("measuring", total=total)
        bench = Bench(
            model,
            repeats=values.repeats,
            step_tokens=values.step_tokens,
            decode_steps=values.decode_steps,
            advance=lambda: bar.advance(task),
        )
        results = [bench.prefill(values.prefill_len)]
        results += [bench.decode(n, values.prompt_len, values.gen_len) for n in batches]
    report = _report(model, results)
    _print(report)
    return report


def _check_writable(path: str) -> None:
    """Raises StokerError unless `path` can be written: before measuring, not after."""
    target = Path(path)
    where = target if target.exists() else target.parent
    if target.is_dir() or not os.access(where, os.W_OK):
        raise StokerError(f"--json: '{path}' cannot be written; name a file in a writable folder")


def _model(values: flags.FlagValues) -> Model:
    """What is measured: a checkpoint, or an architecture with random weights."""
    if values.random_weights is None:
        return common.open_model(values)
    common.cache_programs(values)
    config = choose_numerics(
        architecture(values.random_weights),
        values.dtype,
        values.kv_dtype,
        choose_kernels(values.kernels, values.activations),
    )
    name = f"{values.random_weights}, random {values.weights}"
    mesh, rules = given_mesh(values)
    if mesh is None:
        params = random_weights(config, values.weights)
        return Model(name, Path(), config, params, None, 0, None)
    # Packed part by part, once they are placed.
    plain = random_weights(dataclasses.replace(config, kernels=Kernels()), values.weights)
    return place_model(Model(name, Path(), config, plain, None, 0, None), mesh, rules)


def _batches(given: list[str]) -> list[int]:
    try:
        batches = [int(text) for text in given]
    except ValueError:
        batches = []
    if not batches or min(batches) < 1:
        raise StokerError(f"--batch={','.join(given)}: it takes positive whole numbers, 1,8,32")
    return batches


def _report(model: Model, results: list[Measurement]) -> dict[str, Any]:
    """All figures, as JSON takes them: seconds, bytes, and operations, two to a multiply-add."""
    peak = peak_memory()  # before the probes take memory of their own
    bandwidth, bandwidth_source = memory_bandwidth()
    operations, operations_source = arithmetic_peak(model.config.kernels)
    devices = devices_at_once(model)
    bandwidth, operations = bandwidth * devices, operations * devices
    return {
        "model": model.name,
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "python": platform.python_version(),
        "dtype": model.config.dtype,
        "kv_dtype": model.config.kv_dtype,
        "kernels": dataclasses.asdict(model.config.kernels),
        "load_s": model.load_seconds,
        "parameter_bytes": count_bytes(model.params),
        "mesh": mesh_lines(model),
        "peak_memory_bytes": peak,
        "bandwidth_bytes_s": bandwidth or None,
        "bandwidth_source": bandwidth_source,
        "peak_operations_s": operations or None,
        "peak_operations_source": operations_source,
        "results": [_result(result, bandwidth, operations) for result in results],
    }


def _result(result: Measurement, bandwidth: float, operations: float) -> dict[str, Any]:
    floor = max(
        result.cost.bytes / bandwidth if bandwidth else 0.0,
        result.cost.operations / operations if operations else 0.0,
    )
    return {
        **dataclasses.asdict(result),
        "tok_s": result.tok_s,
        "ttft_s": result.median_s if result.name == "prefill" else None,
        "step_s": result.step_s,
        "host_share": result.host_share,
        "floor_step_s": floor or None,
        "bytes_per_step": result.cost.bytes,
        "operations_per_step": result.cost.operations,
        "bandwidth_share": result.bytes_s / bandwidth if bandwidth else None,
        "operations_share": result.operations_s / operations if operations else None,
    }


def _print(report: dict[str, Any]) -> None:
    table = Table(box=None, padding=(0, 2, 0, 0))
    headings = ("", "B", "context", "tok/s", "ms/step", "floor ms", "host", "MB/step")
    for heading in (*headings, "of bandwidth", "MOP/step", "of peak", "compile s"):
        table.add_column(heading, justify="right" if heading else "left")
    for result in report["results"]:
        floor, share = result["floor_step_s"], result["bandwidth_share"]
        table.add_row(
            result["name"],
            str(result["batch"]),
            str(result["context"]),
            f"{result['tok_s']:.1f}",
            f"{result['step_s'] * 1e3:.2f}",
            f"{floor * 1e3:.2f}" if floor else "-",
            f"{result['host_share']:.0%}",
            f"{result['bytes_per_step'] / 1e6:.1f}",
            f"{share:.0%}" if share else "-",
            f"{result['operations_per_step'] / 1e6:.0f}",
            f"{result['operations_share']:.0%}" if result["operations_share"] else "-",
            f"{result['compile_s']:.1f}",
        )
    kernels = report["kernels"]
    print(
        f"{report['model']} on {report['device']}: {kernels['platform']} kernels, "
        f"{kernels['activations']} activations, {report['kv_dtype']} cache, jax {report['jax']}"
    )
    if report["mesh"]:
        print(f"mesh {'; '.join(report['mesh'])}")
    Console(width=120, highlight=False).print(table)
    print(
        f"first token of {report['results'][0]['context']}: {report['results'][0]['ttft_s']:.3f} s"
    )
    if report["load_s"] is not None:
        print(f"load {report['load_s']:.2f} s")
    memory = report["peak_memory_bytes"] / 1e6
    print(f"peak memory {memory:.0f} MB, parameters {report['parameter_bytes'] / 1e6:.1f} MB")
    limits = [
        f"{value / 1e9:.1f} {unit} ({source})"
        for value, unit, source in (
            (report["bandwidth_bytes_s"], "GB/s", report["bandwidth_source"]),
            (report["peak_operations_s"], "GOP/s", report["peak_operations_source"]),
        )
        if value
    ]
    if limits:
        print(f"limits: {', '.join(limits)}")


COMMAND = Command("bench", define_flags, run, _model)

if __name__ == "__main__":
    sys.exit(COMMAND.main())
