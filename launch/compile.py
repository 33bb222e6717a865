"""`stoker compile`: what compilers make of every step, for hardware that need not be there."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import sys
from pathlib import Path
from typing import Any

import jax
from absl import flags
from rich.console import Console

from ..engine.capacity import DEVICE_SHARE
from ..engine.compiling.contract import Setup, StepShape, contract
from ..engine.compiling.program_report import StepRefused, StepReport, report_step
from ..engine.compiling.targets import Target, find_target, prepare_process, target_kinds
from ..engine.pages import pages_for
from ..engine.programs import device_bytes, own_part
from ..engine.shapes import choose_shapes
from ..models import ops
from ..models.config import DTYPES, KV_DTYPES, Kernels, ModelConfig
from ..models.errors import StokerError
from ..models.loading import open_checkpoint
from ..models.parameters import is_weight
from ..models.placing.placement import placement_report, split_config
from ..models.random_weights import WEIGHTS, architecture, architectures
from ..models.sources import resolve
from ..sharding import make_mesh, parse_mesh, parse_rules
from . import common
from .command import Command, make_folder, write_output
from .compile_tables import print_report
from .meshes import define_mesh_flags

#: Longest sequence, where `--context` is not given.
_CONTEXT = 4096


def define_flags(values: flags.FlagValues) -> None:
    """The flags of this command."""

    def string(name: str, default: str | None, text: str) -> None:
        flags.DEFINE_string(name, default, text, flag_values=values)

    def integer(name: str, default: int | None, text: str) -> None:
        flags.DEFINE_integer(name, default, text, lower_bound=1, flag_values=values)

    def enum(name: str, default: str | None, choices: Any, text: str) -> None:
        flags.DEFINE_enum(name, default, choices, text, flag_values=values)

    string(
        "model",
        "llama-3.1-8b",
        "A name of configs/architectures.toml, a .toml file of your own, or a checkpoint, of which "
        "only the architecture is read.",
    )
    string(
        "target",
        None,
        "Device and topology: v5e:2x4, h200, h200:8, h200:2x8; kinds are "
        f"{', '.join(target_kinds())}.",
    )
    define_mesh_flags(values)
    enum("weights", "bfloat16", WEIGHTS, "Format of the matrices.")
    enum("dtype", "bfloat16", DTYPES, "Type of activations.")
    enum("kv_dtype", None, KV_DTYPES, "Type of cached keys and values; by default --dtype.")
    enum(
        "kernels",
        None,
        ("xla", "tpu", "gpu"),
        "xla, the reference, or the target's own kernels, as by default.",
    )
    integer("slots", 32, "Sequences at once.")
    integer("context", None, f"Longest sequence; by default {_CONTEXT}, or the model's longest.")
    integer("step_tokens", 256, "Most tokens that one step runs: the size of prefill chunks.")
    integer("decode_steps", 1, "Decode steps that the device takes at once.")
    integer("pages", None, "Pages of the cache; by default what slots need and memory allows.")
    string(
        "steps",
        "",
        "Which programs, in place of all: decode, decode:32, prefill:256x4, score, admit; a list.",
    )
    integer("layers", None, "Compile so many layers only, in less time; memory is then theirs.")
    flags.DEFINE_boolean(
        "cache_programs",
        True,
        "Keep compiled programs in the cache folder, for a faster next time.",
        flag_values=values,
    )
    string("text", None, "Write what each program consists of to files in this folder.")
    string("json", None, "Write one JSON object to this file, or - for standard output.")


def run(values: flags.FlagValues) -> None:
    """Compiles and reports."""
    prepare_process()
    if values.target is None:
        raise StokerError("compile for what? give --target, as in --target=v5e:2x4 or h200")
    if values.text is not None:
        make_folder("text", values.text)
    target = find_target(values.target)
    common.cache_programs(values)
    setup = new_setup(values, target)
    shapes = choose_shapes(-(-values.slots // setup.parts), values.step_tokens)
    shapes.check(setup.slots)
    chosen = choose_steps(contract(shapes, values.decode_steps), values.steps)
    reports: list[StepReport | StepRefused] = []
    with common.count_bar() as bar:
        task = bar.add_task("compiling", total=len(chosen))
        for shape in chosen:
            keep = None
            if values.text is not None:
                keep = functools.partial(
                    write_output, "text", str(Path(values.text) / f"{shape}.txt")
                )
            reports.append(report_step(setup, shape, target, keep))
            bar.advance(task)
    described = describe(values, setup, target)
    if values.json != "-":
        print_report(described, reports, Console(width=128, highlight=False))
    if values.json is not None:
        report = described | {"steps": [report.to_json() for report in reports]}
        write_output("json", values.json, json.dumps(report, indent=1) + "\n")


def new_setup(values: flags.FlagValues, target: Target) -> Setup:
    """The engine that the flags describe, without its arrays."""
    try:
        axes, rules = parse_mesh(values.mesh), parse_rules(values.mesh_rules)
        needed = math.prod(axes.values())
        if needed > len(target.devices):
            raise StokerError(
                f"--mesh={values.mesh} takes {needed} devices, and {target.name} has "
                f"{len(target.devices)}; give a larger target"
            )
        mesh = make_mesh(axes, target.devices[:needed]) if axes else None
    except ValueError as error:
        if isinstance(error, StokerError):
            raise
        raise StokerError(f"--mesh or --mesh_rules: {error}") from None
    config = _config(values.model)
    if values.layers is not None:
        config = _shallow(config, values.layers)
    context = min(values.context or _CONTEXT, config.max_positions)
    config = dataclasses.replace(
        config.for_context(context),
        dtype=values.dtype,
        kv_dtype=values.kv_dtype or values.dtype,
        kernels=Kernels(values.kernels or target.platform),
    )
    if mesh is not None:
        config = split_config(config, mesh, rules)
    slots = -(-values.slots // config.split.degree("slots"))
    setup = Setup(config, values.weights, target.devices, mesh, slots, context, pages=1)
    pages = values.pages or _pages(setup, target)
    return dataclasses.replace(setup, pages=pages)


def choose_steps(every: list[StepShape], wanted: str) -> list[StepShape]:
    """Those programs that a list such as `decode:32,prefill` names; all, where it is empty.

    Raises:
      StokerError: one that the contract does not hold; with those that it does.
    """
    if not wanted:
        return every
    found: list[StepShape] = []
    for name in filter(None, (piece.strip() for piece in wanted.split(","))):
        fitting = [shape for shape in every if name in (str(shape), shape.step)]
        if not fitting:
            known = ", ".join(map(str, every))
            raise StokerError(f"--steps: '{name}' is not in the contract, which holds {known}")
        found += [shape for shape in fitting if shape not in found]
    return found


def describe(values: flags.FlagValues, setup: Setup, target: Target) -> dict[str, Any]:
    """What was compiled, for what, and who does what in it."""
    config, params = setup.config, setup.params()
    weights = jax.tree.leaves(jax.tree.map(own_part, params), is_leaf=is_weight)
    memory = {
        "memory_bytes": target.memory_bytes,
        "weight_bytes": device_bytes(params),
        "cache_bytes": device_bytes(setup.cache()),
    }
    return {
        "model": values.model,
        "layers": config.n_layers,
        "shortened": values.layers is not None,
        "weights": values.weights,
        "dtype": config.dtype,
        "kv_dtype": config.kv_dtype,
        "target": target.name,
        "devices": 1 if setup.mesh is None else setup.mesh.size,
        "mesh": str(config.split),
        "mesh_notes": list(placement_report(config)) if setup.mesh is not None else [],
        "jax": jax.__version__,
        "slots": setup.slots * setup.parts,
        "context": setup.context,
        "pages": setup.pages * setup.parts,
        "page_tokens": setup.page_tokens,
        "bandwidth": target.bandwidth,
        "operations": target.operations,
        "kernels": {
            name: dataclasses.asdict(choice)
            for name, choice in ops.choices(config, weights).items()
        },
        **memory,
    }


def _config(name: str) -> ModelConfig:
    if name in architectures() or name.endswith(".toml"):
        return architecture(name)
    return open_checkpoint(resolve(name)).config


def _shallow(config: ModelConfig, layers: int) -> ModelConfig:
    """The first layers of a model."""
    if layers > config.n_layers:
        raise StokerError(f"--layers={layers}: the model has {config.n_layers}")
    dense = min(config.dense_layers, layers)
    return dataclasses.replace(
        config,
        n_layers=layers,
        kinds=config.kinds[:layers],
        dense_layers=dense,
        dense_d_ff=config.dense_d_ff if dense else 0,
    )


def _pages(setup: Setup, target: Target) -> int:
    """Enough for all slots, but no more than a share of what the weights leave, as engines do."""
    one = pages_for(setup.context, setup.page_tokens)
    page = device_bytes(setup.cache()) // 2  # of one page and the dump page
    free = target.memory_bytes - device_bytes(setup.params())
    return max(min(setup.slots * one, int(DEVICE_SHARE * free) // page), one)


COMMAND = Command("compile", define_flags, run)

if __name__ == "__main__":
    sys.exit(COMMAND.main())
