"""Several processes on this machine serve what one does, and none outlives the others."""

from __future__ import annotations

import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import host_job
import pytest
from commands import run
from gguf_files import Tiny, hf_weights, write_gguf

from stoker.launch import generate
from stoker.models.loading import load_model

#: Of the whole job, once one of its processes is gone.
END_S = 30.0
LONG = Tiny(max_positions=8192)
FLAGS = ("--dtype=float32", "--kv_dtype=float32", "--kernels=xla", "--nocache_programs")
ASKED = ("--prompt=the", "--max_tokens=12", "--ignore_eos")


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_gguf(tmp_path_factory.mktemp("model") / "tiny.gguf", LONG))


@pytest.fixture
def jobs() -> Iterator[list[subprocess.Popen]]:
    """Processes that a test started, none of which stays."""
    started: list[subprocess.Popen] = []
    yield started
    for process in started:
        process.kill()
        process.wait()


def free_port(first: int = 0) -> int:
    """A port that is free, from `first` on if given."""
    for port in range(first, 65536):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return probe.getsockname()[1]
    raise AssertionError("no port is free")


def start(environment: dict[str, str], devices: int, *command: str) -> subprocess.Popen:
    xla = f"--xla_force_host_platform_device_count={devices} --xla_backend_optimization_level=0"
    return subprocess.Popen(
        [sys.executable, "-m", *command],
        env=environment | {"XLA_FLAGS": xla},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def commands(port: int, count: int, name: str, *flags: str) -> list[tuple[str, ...]]:
    """The command lines of `count` processes."""
    shared = (f"--coordinator=127.0.0.1:{port}", f"--num_processes={count}")
    return [
        ("stoker.launch.cli", name, *FLAGS, *flags, *shared, f"--process_id={index}")
        for index in range(count)
    ]


def ends(process: subprocess.Popen, within_s: float) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=within_s)
    return process.returncode, out, err


def test_four_processes_serve_as_one_until_one_is_killed(
    capsys, helpers_on_path: dict[str, str], jobs: list[subprocess.Popen], path: str
) -> None:
    """PAR-08: greedy, drawn, penalised and scored requests, and `stoker score`; then a kill in the
    midst of a reply."""
    pathlib.Path(path).with_suffix(".json").write_text(json.dumps([*range(5, 40, 3)]))
    where = f"127.0.0.1:{free_port()}"
    mesh = "data:2,tensor:2"
    jobs += [
        start(helpers_on_path, 1, "host_job", where, "4", str(index), path, mesh)
        for index in range(4)
    ]
    alone = load_model(path, **host_job.NUMERICS)
    expected = host_job.tokens(alone)
    capsys.readouterr()
    host_job.score(alone)
    scored = json.loads(capsys.readouterr().out)
    assert jobs[0].stdout is not None
    lines = (line for line in jobs[0].stdout if not line.startswith("[Gloo]"))
    assert json.loads(next(lines)) == expected
    assert json.loads(next(lines)) == {
        **scored,
        "logprobs": pytest.approx(scored["logprobs"], abs=1e-4),
        "perplexity": pytest.approx(scored["perplexity"], rel=1e-4),
    }
    for _ in range(5):
        assert next(lines) == "token\n"
    jobs[2].send_signal(signal.SIGKILL)
    killed = time.monotonic()
    for index in (0, 1, 3):
        status, out, err = ends(jobs[index], END_S)
        assert status != 0
        assert "process 2 (127.0.0.1) was lost: its connection closed" in err
        if index:
            # Parts of rows, of columns, and what all hold: nothing else is read.
            (line,) = (line for line in out.splitlines() if line.startswith("read"))
            read, held = map(int, line.split()[1:])
            assert read <= held < 0.6 * os.path.getsize(path)
    assert time.monotonic() - killed < END_S


def test_a_command_finds_its_cluster_and_only_process_0_prints(
    capsys, helpers_on_path: dict[str, str], jobs: list[subprocess.Popen], path: str
) -> None:
    """Two processes of two devices, which `jax.distributed` finds as Slurm describes them."""
    flags = (f"--model={path}", *ASKED, *FLAGS)
    status, expected, _ = run(capsys, generate, *flags)
    assert status == 0
    port = free_port(65536 - 4096)
    slurm = {"SLURM_JOB_ID": str(port), "SLURM_NTASKS": "2", "SLURM_STEP_NODELIST": "localhost"}
    for index in range(2):
        own = slurm | {"SLURM_PROCID": str(index), "SLURM_LOCALID": str(index)}
        command = ("stoker.launch.cli", "generate", *flags, "--mesh=tensor:4", "--coordinator=auto")
        # Slurm's numbers would give each process one device of a GPU host.
        jobs.append(start(helpers_on_path | own, 2, *command))
    (status, out, err), (other, nothing, _) = (ends(process, 200) for process in jobs)
    assert (status, out) == (0, expected), err
    assert (other, nothing) == (0, "")


@pytest.mark.parametrize("what", ["other weights", "no file", "interrupted"])
def test_all_end_with_the_reason(
    helpers_on_path: dict[str, str],
    jobs: list[subprocess.Popen],
    path: str,
    tmp_path: pathlib.Path,
    what: str,
) -> None:
    """A process that has another model or none, and Ctrl-C on process 0."""
    files = [path, str(tmp_path / "tiny.gguf")]
    if what == "other weights":
        weights = hf_weights(LONG)
        weights["model.norm.weight"] = weights["model.norm.weight"] + 0.5
        write_gguf(pathlib.Path(files[1]), LONG, weights)
    asked = ("--prompt=the", "--max_tokens=8000", "--ignore_eos", "--mesh=tensor:2")
    if what == "interrupted":
        files[1] = path
    lines = commands(free_port(), 2, "generate", *asked)
    for line, file in zip(lines, files, strict=True):
        jobs.append(start(helpers_on_path, 1, *line, f"--model={file}"))
    if what == "interrupted":
        assert jobs[0].stdout is not None
        assert jobs[0].stdout.read(8)
        jobs[0].send_signal(signal.SIGINT)
    reason = {
        "other weights": "process 1 has weights",
        "no file": f"'{files[1]}'",
        "interrupted": "process 0 was interrupted",
    }[what]
    results = [ends(process, 200) for process in jobs]
    statuses = [status for status, _, _ in results]
    assert statuses == ([130, 130] if what == "interrupted" else [1, 1])
    for index, (_, _, err) in enumerate(results):
        told = [line for line in err.splitlines() if line.startswith("stoker generate: ")]
        if what == "interrupted" and index == 0:
            assert told == []
        else:
            assert len(told) == 1 and reason in told[0], err


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (("--num_processes=2",), "--num_processes belongs to several processes"),
        (("--coordinator=auto", "--process_id=1"), "--coordinator=auto finds --process_id itself"),
        (("--coordinator=here",), "coordinator 'here' is no address; give host:port"),
        (("--coordinator=::1:70",), "coordinator '::1:70' is no address"),
        (("--coordinator=localhost:70",), "takes --num_processes and --process_id too"),
        (
            ("--coordinator=localhost:70", "--num_processes=2", "--process_id=2"),
            "--process_id=2 of --num_processes=2: numbers go from 0 to 1",
        ),
    ],
)
def test_flags_that_do_not_fit(capsys, path: str, flags: tuple[str, ...], problem: str) -> None:
    status, out, err = run(capsys, generate, f"--model={path}", *ASKED, *flags)
    assert (status, out) == (1, "")
    assert problem in err and err.count("\n") == 1
