"""`stoker compile`: its flags here, and by the marker `compile` what the compilers say."""

from __future__ import annotations

import json
import math
import pathlib
from collections.abc import Iterable
from typing import Any

import jax
import pytest

from stoker.engine.compiling import targets
from stoker.engine.compiling.targets import find_target, target_kinds
from stoker.launch import compile as command
from stoker.models.errors import StokerError
from stoker.models.parameters import abstract_params
from stoker.models.random_weights import architecture


def run(capsys: pytest.CaptureFixture[str], *flags: str) -> tuple[int, str, str]:
    status = command.COMMAND.main([*flags, "--nocache_programs"])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_without_a_compiler_one_line_says_what_to_install(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(targets, "_installed", lambda _: False)
    for target, extra in (("v5e:2x4", "tpu-compile"), ("h200", "gpu-compile")):
        status, out, err = run(capsys, f"--target={target}")
        assert (status, out, err.count("\n")) == (1, "", 1)
        assert f"pip install 'stoker[{extra}]'" in err


def test_a_folder_is_made_or_refused_before_compiling(
    capsys: pytest.CaptureFixture[str], tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(targets, "_installed", lambda _: False)
    status, _, err = run(capsys, "--target=v5e:2x4", f"--text={tmp_path / 'new' / 'folder'}")
    assert (status, "--text" in err) == (1, False)
    assert (tmp_path / "new" / "folder").is_dir()
    taken = tmp_path / "taken"
    taken.write_text("")
    status, _, err = run(capsys, "--target=v5e:2x4", f"--text={taken}")
    assert status == 1 and f"--text: cannot make the folder '{taken}': File exists" in err


def test_targets_are_named_by_kind_and_topology(capsys: pytest.CaptureFixture[str]) -> None:
    status, _, err = run(capsys)
    assert status == 1 and "--target" in err
    with pytest.raises(StokerError, match="target 'v9z' is not known; use v4, v5e"):
        find_target("v9z")
    with pytest.raises(StokerError, match="topology 'big'"):
        find_target("v5e:big")
    for kind, facts in target_kinds().items():
        assert facts["platform"] in ("tpu", "gpu"), kind
        assert facts["memory_bytes"] > 2**33 and facts["bandwidth"] > 5e11


#: Of the engine: more pages than vector memory holds, where XLA would move a smaller cache, whole.
STEPS_AT_ONCE = 4
SIZES = ("--slots=32", "--step_tokens=64", "--context=4096", f"--decode_steps={STEPS_AT_ONCE}")
#: One program of every kind: of a few sizes that kernels and the compiler treat alike, the largest.
KINDS = ("admit", "decode:32", f"decode_steps:32x{STEPS_AT_ONCE}", "prefill:64x32", "score:64")
#: The smallest too, for one model: fewer rows than a tile or a block of a kernel has.
SMALLEST = ("decode:1", "prefill:16x4")
#: Layers, so that each kind is there, of one model twice; and formats of weights.
MODELS: dict[str, tuple[int, str]] = {
    "smollm2-135m": (2, "int4"),
    "llama-3.1-8b": (1, "int4"),
    "gemma-3-4b": (6, "bfloat16"),
    "qwen3-30b-a3b": (1, "int4"),
    "deepseek-v3": (4, "int8"),
}
TARGETS = ("v5e", "v5p", "v6e", "h200")
#: Slices that DeepSeek-V3 fits in int8, whole, and how many devices these are.
SLICES = {
    "v5e": ("v5e:8x8", 64),
    "v5p": ("v5p:4x4x4", 64),
    "v6e": ("v6e:8x8", 64),
    "h200": ("h200:8", 8),
}


def compiled(
    capsys: pytest.CaptureFixture[str],
    model: str,
    target: str,
    steps: Iterable[str],
    weights: str | None = None,
    layers: int | None = None,
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The report, and its steps; weights and layers are those of `MODELS`, if not given."""
    flags = list(SIZES)
    if model == "deepseek-v3":
        target, devices = SLICES[target]
        flags.append(f"--mesh=expert:{devices}")
    flags += [f"--model={model}", f"--target={target}", f"--steps={','.join(steps)}", "--json=-"]
    flags += [f"--layers={layers or MODELS[model][0]}", f"--weights={weights or MODELS[model][1]}"]
    status, out, err = run(capsys, *flags)
    assert status == 0, err
    report = json.loads(out)
    return report, report["steps"]


def dense_layer(report: dict[str, Any]) -> float:
    """Bytes of a layer's matrices in bfloat16, of the smallest layer, on each device."""
    layers = abstract_params(architecture(report["model"]))["layers"][: report["layers"]]
    sizes = [sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(layer)) for layer in layers]
    return 2 * min(sizes) / report["devices"]


def check(report: dict[str, Any], step: dict[str, Any]) -> None:
    """Nothing is copied, widened or gathered, and everything fits."""
    name, layers = step["step"], report["layers"]
    assert step["fits"], step
    assert step["cache_aliased"], name
    assert step["cache_copies"] == 0, name
    found = dict(step["collectives"])
    if report["mesh"]:
        # One of a few numbers for each row is a gather or a sum, as the compiler likes.
        assert found.pop("all-to-all") == 1, name
        assert sum(found.values()) == 2 * layers + 2, name
        assert found["all-reduce"] >= 2 * layers + 1, name
    else:
        assert found == {}, name
    assert step["dense_weights"] == 0, name
    pages = report["cache_bytes"] / layers
    assert step["temporary_bytes"] < pages, name
    # No array is as large as a layer's pages, or its matrices as floats; but logits may be.
    largest, logits = step["largest_temporary"], step["counted"]["logits"]
    at_once = logits / STEPS_AT_ONCE if name.startswith("decode_steps") else logits
    assert largest < min(pages, dense_layer(report)) or largest <= at_once, name
    attentions = [count for kernel, count in step["kernels"].items() if "attention" in kernel]
    assert attentions == [layers], name
    if name.startswith("decode"):
        # The layers within a tenth; and sampling goes over the logits a few times. Sums that GPUs
        # add up, of products and attention, weigh more beside an eighth of DeepSeek's dense layers.
        tenth, excess = 0.1 * step["counted_bytes"], step["program_bytes"] - step["counted_bytes"]
        most = 1.5 * tenth if report["mesh"] and report["target"].startswith("h200") else tenth
        assert -tenth < excess < most + 16 * logits, name


@pytest.mark.contract
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("model", MODELS)
def test_every_kind_of_step(capsys: pytest.CaptureFixture[str], model: str, target: str) -> None:
    steps = (*KINDS, *(SMALLEST if model == "smollm2-135m" else ()))
    report, (admit, *others) = compiled(capsys, model, target, steps)
    assert admit["aliased_bytes"] > 0 and admit["temporary_bytes"] < 2**23
    assert len(others) == len(steps) - 1
    for step in others:
        check(report, step)


@pytest.mark.compile
@pytest.mark.parametrize(
    ("target", "steps"),
    [("v5e", ["prefill:64x32"]), ("v6e", ["score:64"]), ("h200", ["decode:32", "prefill:64x32"])],
)
def test_steps_of_quantised_weights(
    capsys: pytest.CaptureFixture[str], target: str, steps: list[str]
) -> None:
    report, found = compiled(capsys, "llama-3.1-8b", target, steps)
    for step in found:
        check(report, step)
        assert step["kernels"]["stoker_matmul"] == 7 * report["layers"] + 1


@pytest.mark.compile
def test_the_counts_of_each_layer_agree(capsys: pytest.CaptureFixture[str]) -> None:
    """Of four layers more than of two: without what the embedding and sampling move."""
    found = []
    for layers in (2, 4):
        steps = ["decode:32"]
        report, (step,) = compiled(capsys, "llama-3.1-8b", "v5p", steps, "bfloat16", layers)
        check(report, step)
        # The model's own rules explain its figure.
        assert abs(step["surplus"]["other"]) < 0.1 * step["compiler_bytes"]
        found.append((step["program_bytes"], step["counted_bytes"], step["compiler_bytes"]))
    program, counted, model = (after - before for before, after in zip(*found, strict=True))
    assert program == pytest.approx(counted, rel=0.1)
    assert model is not None


@pytest.mark.compile
def test_what_does_not_fit_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--model=llama-3-70b", "--layers=16", "--target=v5e", "--steps=decode:32")
    status, out, err = run(capsys, *flags, *SIZES)
    assert status == 0, err
    assert "does not fit" in out
