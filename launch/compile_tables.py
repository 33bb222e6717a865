"""What `stoker compile` prints."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from ..engine.compiling.cost_model import Surplus
from ..engine.compiling.program_report import StepRefused, StepReport


def print_report(
    described: dict[str, Any], reports: Sequence[StepReport | StepRefused], console: Console
) -> None:
    """The tables of memory, of bytes, and of what programs consist of."""
    for line in _heading(described):
        console.print(line, markup=False, soft_wrap=True)
    made = [report for report in reports if isinstance(report, StepReport)]
    for table in (_memory(made, described), _bytes(made, described), _surplus(made)):
        console.print()
        console.print(table)
    console.print()
    for line in _programs(made, described["layers"]):
        console.print(line, markup=False, soft_wrap=True)
    for report in reports:
        if isinstance(report, StepRefused):
            console.print(f"{report.step} does not fit: {report.problem}", markup=False)
    console.print(_verdict(reports, described), markup=False, soft_wrap=True)


def _heading(described: dict[str, Any]) -> list[str]:
    mesh = f", mesh {described['mesh']}" if described["mesh"] else ""
    shortened = " (shortened)" if described["shortened"] else ""
    lines = [
        f"{described['model']}: {described['layers']} layers{shortened}, {described['weights']} "
        f"weights, {described['kv_dtype']} cache, on {described['devices']} of "
        f"{described['target']}{mesh}; jax {described['jax']}",
        f"{described['slots']} slots of {described['context']} tokens on {described['pages']} "
        f"pages of {described['page_tokens']}; each device holds "
        f"{described['weight_bytes'] / 1e9:.2f} GB of weights and "
        f"{described['cache_bytes'] / 1e9:.2f} GB of cache, "
        f"of {described['memory_bytes'] / 1e9:.1f}",
        *described["mesh_notes"],
    ]
    for name, choice in described["kernels"].items():
        lines.append(f"{name}: {choice['implementation']} ({choice['why']})")
    return lines


def _table(*headings: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0))
    for heading in headings:
        table.add_column(heading, justify="right" if heading != headings[0] else "left")
    return table


def _memory(reports: Sequence[StepReport], described: dict[str, Any]) -> Table:
    table = _table(
        *("MB on each device", "arguments", "temporaries", "aliased", "in all"),
        *("of memory", "KV aliased", "KV copies", "compile s"),
    )
    for report in reports:
        table.add_row(
            report.step,
            _mega(report.argument_bytes),
            _mega(report.temporary_bytes),
            _mega(report.aliased_bytes),
            _mega(report.total_bytes),
            f"{report.total_bytes / described['memory_bytes']:.0%}",
            _aliased(report),
            str(report.cache_copies),
            f"{report.seconds:.1f}",
        )
    return table


def _aliased(report: StepReport) -> str:
    if not report.cache_bytes:
        return "-"
    return "yes" if report.cache_aliased else "NO"


def _bytes(reports: Sequence[StepReport], described: dict[str, Any]) -> Table:
    table = _table(
        *("MB moved on each device", "counted", "weights", "KV", "program", "of counted"),
        *("cost model", "GOP counted", "cost model", "floor ms"),
    )
    for report in reports:
        cost = report.counted
        if not report.weight_bytes:
            continue
        floor = max(cost.bytes / described["bandwidth"], cost.operations / described["operations"])
        table.add_row(
            report.step,
            _mega(cost.bytes),
            _mega(cost.weights),
            _mega(cost.kv_read + cost.kv_write),
            _mega(report.program_bytes),
            f"{report.program_bytes / cost.bytes:.0%}",
            _mega(report.compiler_bytes),
            f"{cost.operations / 1e9:,.1f}",
            "-"
            if report.compiler_operations is None
            else f"{report.compiler_operations / 1e9:,.1f}",
            f"{floor * 1e3:.2f}",
        )
    return table


def _surplus(reports: Sequence[StepReport]) -> Table:
    """Where the cost model's bytes are those of the program, and where they are others."""
    names = [field.name for field in dataclasses.fields(Surplus)]
    table = _table(
        *("MB by the cost model", "program", *(name.replace("_", " ") for name in names), "in all")
    )
    for report in reports:
        if report.weight_bytes and report.surplus is not None:
            parts = (_signed(getattr(report.surplus, name)) for name in names)
            table.add_row(
                *(report.step, _mega(report.program_bytes), *parts, _mega(report.compiler_bytes))
            )
    return table


def _mega(size: float | None) -> str:
    return "-" if size is None else f"{size / 1e6:,.1f}"


def _signed(size: float) -> str:
    mega = round(size / 1e6, 1)
    return f"{mega:+,.1f}" if mega else "0"


def _programs(reports: Sequence[StepReport], layers: int) -> list[str]:
    """Collectives and kernels of each program, those that are alike together."""
    lines: dict[str, list[str]] = {}
    for report in reports:
        counts = {**report.collectives, **report.kernels}
        text = ", ".join(_per_layer(name, count, layers) for name, count in counts.items())
        if report.dense_weights:
            text += f"; {report.dense_weights} QUANTISED MATRICES WRITTEN OUT AS FLOATS"
        lines.setdefault(text or "no collectives, and no kernels but XLA's", []).append(report.step)
    return [f"{', '.join(steps)}: {text}" for text, steps in lines.items()]


def _per_layer(name: str, count: int, layers: int) -> str:
    """So many in each layer, and so many besides."""
    each, besides = divmod(count, layers)
    if not each:
        return f"{name} {count}"
    return f"{name} {each} a layer" + (f" + {besides}" if besides else "")


def _verdict(reports: Sequence[StepReport | StepRefused], described: dict[str, Any]) -> str:
    seconds = sum(report.seconds for report in reports)
    wrong = [r.step for r in reports if isinstance(r, StepRefused) or not r.fits]
    text = f"does not fit: {', '.join(wrong)}" if wrong else "every program fits"
    return f"{len(reports)} programs in {seconds:.0f} s; {text} in {described['memory_bytes']:,} B"
