"""`stoker compile`: its flags here, and by the marker `compile` what the compilers say."""

from __future__ import annotations

import json
from typing import Any

import pytest

from stoker.engine.compiling import targets
from stoker.engine.compiling.targets import find_target, target_kinds
from stoker.launch import compile as command
from stoker.models.errors import StokerError


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


#: Few programs, and more pages than vector memory holds: XLA moves a smaller cache there, whole.
SIZES = ("--slots=32", "--step_tokens=64", "--context=4096")
#: Layers, formats of weights, and what DeepSeek-V3 needs, whose experts fit no device.
MODELS: dict[str, tuple[int, str]] = {
    "smollm2-135m": (2, "int4"),
    "llama-3.1-8b": (2, "int4"),
    "gemma-3-4b": (6, "int8"),
    "qwen3-30b-a3b": (2, "int4"),
    "deepseek-v3": (4, "int8"),
}
TARGETS = ("v5e", "v5p", "v6e", "h200")
#: Slices that DeepSeek-V3 fits in int8, whole.
SLICES = {"v5e": "v5e:8x16", "v5p": "v5p:4x4x4", "v6e": "v6e:8x8", "h200": "h200:8"}
EXPERTS = {"v5e": 128, "v5p": 64, "v6e": 64, "h200": 8}


def compiled(
    capsys: pytest.CaptureFixture[str], model: str, target: str, steps: str, *flags: str
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The report, and its steps."""
    layers, weights = MODELS.get(model, (2, "bfloat16"))
    if model == "deepseek-v3":
        flags += (f"--mesh=expert:{EXPERTS[target]}",)
        target = SLICES[target]
    names = (f"--model={model}", f"--layers={layers}", f"--weights={weights}")
    given = (*names, f"--target={target}", f"--steps={steps}", "--json=-", *SIZES, *flags)
    status, out, err = run(capsys, *given)
    assert status == 0, err
    report = json.loads(out)
    return report, report["steps"]


def check(report: dict[str, Any], step: dict[str, Any]) -> None:
    """Nothing is copied, widened or gathered, and everything fits."""
    layers, latent = report["layers"], report["model"] == "deepseek-v3"
    assert step["fits"], step
    assert step["cache_aliased"]
    assert step["cache_copies"] == 0
    found = dict(step["collectives"])
    if report["mesh"]:
        # One of a few numbers for each row is a gather or a sum, as the compiler likes.
        assert found.pop("all-to-all") == 1
        assert sum(found.values()) == 2 * layers + 2
        assert found["all-reduce"] >= 2 * layers + 1
    else:
        assert found == {}
    # Less than what the cache holds of a layer.
    assert step["temporary_bytes"] < report["cache_bytes"] / layers
    if latent:
        # So far no kernel attends to latent vectors, nor multiplies with each head's matrices: the
        # reference gathers pages and widens those two matrices of a layer.
        return
    assert step["dense_weights"] == 0
    assert step["kernels"]["stoker_attention"] == layers
    if step["step"].startswith("decode"):
        # The layers within a tenth; and sampling goes over the logits a few times.
        counted = step["counted"]
        excess = step["program_bytes"] - step["counted_bytes"]
        assert -0.1 * step["counted_bytes"] < excess
        assert excess < 0.1 * step["counted_bytes"] + 16 * counted["logits"]


@pytest.mark.contract
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("model", MODELS)
def test_decode_steps(capsys: pytest.CaptureFixture[str], model: str, target: str) -> None:
    report, (step,) = compiled(capsys, model, target, "decode:32")
    check(report, step)


@pytest.mark.contract
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("model", MODELS)
def test_other_steps(capsys: pytest.CaptureFixture[str], model: str, target: str) -> None:
    report, (admit, *others) = compiled(capsys, model, target, "admit,prefill:64x32,score:64")
    assert admit["aliased_bytes"] > 0 and admit["temporary_bytes"] < 2**23
    for step in others:
        check(report, step)


@pytest.mark.compile
def test_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    report, (decode, prefill) = compiled(capsys, "llama-3.1-8b", "h200", "decode:32,prefill:64x32")
    check(report, decode)
    check(report, prefill)
    assert decode["kernels"]["stoker_matmul"] == 7 * 2 + 1


@pytest.mark.compile
def test_the_counts_of_each_layer_agree(capsys: pytest.CaptureFixture[str]) -> None:
    """Of four layers more than of two: without what the embedding and sampling move."""
    found = []
    for layers in (2, 4):
        flags = (f"--layers={layers}", "--weights=bfloat16")
        report, (step,) = compiled(capsys, "llama-3.1-8b", "v5p", "decode:32", *flags)
        check(report, step)
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
