"""Numerics and speed of this host's accelerator, in one timed run; see `device_check.sh`.

What no time is left for is left out and named: a rented device goes back on time.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import jax
from absl import app, flags
from device_numerics import check_operations
from device_speed import Case, copy_bandwidth, measure, prefill_products, prepare, product_peak
from rich.console import Console
from rich.table import Table

from stoker.models.config import PALLAS, Kernels

FLAGS = flags.FLAGS
flags.DEFINE_string("out", "device_check", "Folder for report.json.")
flags.DEFINE_float("budget", 280.0, "Seconds for everything.")
flags.DEFINE_list("architectures", ["llama-3.2-1b", "llama-3.1-8b"], "To measure, by shape.")
flags.DEFINE_list("weights", ["int4", "bfloat16", "int8"], "Formats of their matrices.")
flags.DEFINE_list("batch", ["1", "32", "128"], "Sequences decoded at once.")
flags.DEFINE_list("context", ["512", "8192"], "Tokens in the cache of each.")
flags.DEFINE_string("operations", "", "Check those only whose names hold this.")
flags.DEFINE_integer("layers", 0, "Measure so many layers only; 0 for all.")
flags.DEFINE_integer("megabytes", 2048, "Size of the array whose copying is timed.")
flags.DEFINE_integer("size", 8192, "Rows and columns of the product that is timed.")


def main(_: list[str]) -> None:
    """Runs all parts in turn; the report is written after each."""
    deadline = time.monotonic() + FLAGS.budget
    device = jax.devices()[0]
    kernels = Kernels(device.platform if device.platform in PALLAS else "xla")
    report: dict[str, Any] = {
        "device": device.device_kind,
        "platform": device.platform,
        "jax": jax.__version__,
        "python": sys.version.split()[0],
        "kernels": kernels.platform,
    }
    console = Console(width=120, highlight=False)
    console.print(f"{device.device_kind}, jax {jax.__version__}, kernels {kernels.platform}")

    bandwidth, peak = copy_bandwidth(FLAGS.megabytes), product_peak(FLAGS.size)
    report |= {"bandwidth_bytes_s": bandwidth, "peak_operations_s": peak}
    console.print(
        f"copy {bandwidth / 1e9:,.0f} GB/s, products {peak / 1e12:,.1f} TOP/s in bfloat16"
    )
    if kernels.platform in PALLAS:
        report["prefill_products"] = prefill_products(kernels, FLAGS.size)
        for name, speed in report["prefill_products"].items():
            console.print(
                f"512 rows by weights and activations of {name}: {speed / 1e12:,.1f} TOP/s"
            )
    _write(report)

    cases = [
        Case(name, weights, int(batch), tuple(map(int, FLAGS.context)), FLAGS.layers)
        for weights in FLAGS.weights
        for name in FLAGS.architectures
        for batch in FLAGS.batch
    ]
    prepared = prepare(cases, kernels)
    results = check_operations(kernels, deadline - 0.6 * FLAGS.budget, FLAGS.operations)
    report["numerics"] = [dataclasses.asdict(result) for result in results]
    table = Table("operation", "largest error", "allowed", "", box=None, padding=(0, 2, 0, 0))
    for result in results:
        error = "-" if result.error is None else f"{result.error:.1e}"
        table.add_row(result.name, error, f"{result.allowed:.0e}", result.verdict)
    console.print(table)
    _write(report)

    report["decode"] = []
    table = Table("decode", box=None, padding=(0, 2, 0, 0))
    for heading in (
        "B",
        "context",
        "ms/step",
        "tok/s",
        "floor ms",
        "of floor",
        "GB/s",
        "compile s",
    ):
        table.add_column(heading, justify="right")
    for result in measure(prepared, bandwidth, peak, deadline):
        report["decode"].append(dataclasses.asdict(result))
        name = f"{result.architecture}, {result.weights}"
        if result.problem:
            table.add_row(name, str(result.batch), str(result.context), result.problem)
        else:
            table.add_row(
                name,
                str(result.batch),
                str(result.context),
                f"{result.step_s * 1e3:.3f}",
                f"{result.batch / result.step_s:,.0f}",
                f"{result.floor_s * 1e3:.3f}",
                f"{result.floor_s / result.step_s:.0%}",
                f"{result.bytes / result.step_s / 1e9:,.0f}",
                f"{result.compile_s:.1f}",
            )
        _write(report)
    console.print(table)
    report["seconds"] = FLAGS.budget - (deadline - time.monotonic())
    _write(report)
    wrong = [result.name for result in results if result.verdict.startswith("WRONG")]
    console.print(
        f"{report['seconds']:.0f} s; {'wrong: ' + ', '.join(wrong) if wrong else 'no errors'}"
    )
    sys.stdout.flush()
    # Programs that still compile would hold the process, and the device.
    os._exit(1 if wrong else 0)


def _write(report: dict[str, Any]) -> None:
    folder = Path(FLAGS.out)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "report.json").write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    app.run(main)
