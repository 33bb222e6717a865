"""`stoker bench`: figures that add up, replays, and errors as one line."""

from __future__ import annotations

import json
import pathlib

import pytest
from commands import run

from stoker.launch import bench
from stoker.models.parameters import abstract_params, count_elements
from stoker.models.random_weights import architecture, architectures


def test_bench_measures_and_reports(capsys, tmp_path: pathlib.Path, model: str) -> None:
    path = tmp_path / "bench.json"
    flags = ("--batch=1,3", "--prompt_len=5", "--gen_len=4", "--prefill_len=20", "--repeats=2")
    status, out, err = run(capsys, bench, f"--model={model}", *flags, f"--json={path}")
    assert (status, err) == (0, "")
    report = json.loads(path.read_text())
    prefill, one, three = report["results"]
    assert [r["name"] for r in report["results"]] == ["prefill", "decode", "decode"]
    assert (prefill["tokens"], one["tokens"], three["tokens"]) == (20, 3, 9)
    for result in report["results"]:
        assert len(result["seconds"]) == 2
        median = sum(result["seconds"]) / 2
        assert result["tok_s"] == pytest.approx(result["tokens"] / median)
        assert result["step_s"] == pytest.approx(median / result["n_steps"])
        share = result["bytes_per_step"] / result["step_s"] / report["bandwidth_bytes_s"]
        assert result["bandwidth_share"] == pytest.approx(share)
    assert three["cost"]["kv_write"] == 3 * one["cost"]["kv_write"]
    assert three["cost"]["logits"] == 3 * one["cost"]["logits"]
    for word in ("prefill", "decode", "tok/s", "floor ms", "GB/s", "peak memory"):
        assert word in out


@pytest.mark.parametrize("weights", ["float32", "int4"])
@pytest.mark.parametrize("kernels", ["xla", "cpu"])
def test_bench_of_random_weights(capsys, tmp_path, weights: str, kernels: str) -> None:
    path = tmp_path / "tiny.toml"
    path.write_text(
        'family = "llama"\nvocab_size = 96\nd_model = 64\nn_layers = 1\nn_heads = 4\n'
        "n_kv_heads = 2\nhead_dim = 16\nd_ff = 96\nmax_positions = 64\nnorm_eps = 1e-5\n"
        "rope = { theta = 1e4, dims = 16 }\n"
    )
    flags = (f"--random_weights={path}", f"--weights={weights}", f"--kernels={kernels}")
    sizes = ("--batch=2", "--prompt_len=5", "--gen_len=4", "--prefill_len=8", "--repeats=1")
    status, out, _ = run(capsys, bench, *flags, *sizes)
    assert status == 0
    assert f"random {weights}" in out and f"{kernels} kernels" in out


#: Billions of parameters, as the makers of the models count them (a tied head once).
PUBLISHED = {
    "smollm2-135m": 0.135,
    "smollm2-1.7b": 1.71,
    "llama-3.2-1b": 1.24,
    "llama-3.1-8b": 8.03,
    "llama-3-70b": 70.6,
    "mixtral-8x7b": 46.7,
    "gemma-3-4b": 3.88,
    "qwen2.5-0.5b": 0.494,
    "qwen3-0.6b": 0.596,
    "qwen3-30b-a3b": 30.5,
    "gpt-oss-20b": 20.9,
    "deepseek-v2-lite": 15.7,
    "deepseek-v3": 671,
}


@pytest.mark.parametrize("name", architectures())
def test_known_architectures_have_the_published_size(name: str) -> None:
    billions = count_elements(abstract_params(architecture(name))) / 1e9
    assert billions == pytest.approx(PUBLISHED[name], rel=0.006)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--batch=0"], "--batch=0: it takes positive whole numbers"),
        (["--batch=a"], "--batch=a: it takes positive whole numbers"),
        (["--gen_len=1"], "--gen_len=1 leaves no decode step"),
        (["--prefill_len=300"], "sequences of 300 tokens: this model takes at most 256"),
        (["--random_weights=nonsense"], "architecture 'nonsense' is not known; use smollm2-135m"),
        (["--random_weights=/no/file.toml"], "cannot read '/no/file.toml'"),
        (["--json=/no/folder/x.json"], "--json: '/no/folder/x.json' cannot be written"),
        (["--weights=int8"], "--weights is the format of --random_weights"),
        (["--kernels=xla", "--activations=int8"], "activations 'int8' need the kernels of"),
    ],
)
def test_bad_benches_end_in_one_line(capsys, model: str, flags: list[str], message: str) -> None:
    status, out, err = run(capsys, bench, f"--model={model}", *flags)
    assert (status, out, err.count("\n")) == (1, "", 1)
    assert message in err


def test_bench_replays_arrivals(capsys, tmp_path, model: str) -> None:
    path = tmp_path / "report.json"
    flags = (f"--model={model}", "--slots=4", "--step_tokens=16", f"--json={path}")
    sizes = ("--prompt_len=6", "--gen_len=5", "--shared_len=20", "--requests=9")
    status, out, err = run(capsys, bench, *flags, *sizes, "--rate=inf")
    assert status == 0
    assert "4 slots of" in err
    assert "first token" in out and "9 requests in" in out
    report = json.loads(path.read_text())
    assert (report["requests"], report["late_compilations"]) == (9, 0)
    assert report["cached_tokens"] == 8 * 16
    assert report["ttft_s"]["p50"] <= report["ttft_s"]["p99"]
    trace = tmp_path / "trace.json"
    trace.write_text('[{"at": 0, "prompt_len": 3, "gen_len": 2}]')
    status, out, _ = run(capsys, bench, *flags, f"--trace={trace}", "--nomixed")
    assert status == 0 and "1 requests in" in out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--rate=0"], "requests must arrive"),
        (["--rate=1", "--trace=x"], "give one of them"),
        (["--trace=/no/such"], "cannot read '/no/such'"),
    ],
)
def test_bad_replays_end_in_one_line(capsys, model: str, flags: list[str], message: str) -> None:
    status, _, err = run(capsys, bench, f"--model={model}", *flags)
    assert status == 1
    assert message in err and err.count("\n") == 1


def test_too_much_memory_is_one_line(capsys, model: str) -> None:
    sizes = ("--batch=2000000000", "--prompt_len=2", "--gen_len=2", "--prefill_len=2")
    status, _, err = run(capsys, bench, f"--model={model}", *sizes)
    assert status == 1
    assert "out of memory" in err and err.count("\n") == 1
