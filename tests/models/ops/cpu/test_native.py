"""The kernels under sanitizers, as a program of their own (tests/native/kernels_test.cc)."""

from __future__ import annotations

import os
import pathlib
import shutil
import subprocess

import pytest

ROOT = pathlib.Path(__file__).parents[4]
KERNELS = ROOT / "models" / "ops" / "cpu"
FLAGS = ["-std=c++17", "-g1", "-ffp-contract=off", "-pthread", "-w"]
# What keeps each build short: unoptimised code compiles quickest, but races need speed.
SANITIZERS = {"address,undefined": "-O0", "thread": "-O1"}


@pytest.fixture(scope="module")
def compiler() -> str:
    found = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    if not found:
        pytest.fail("this test needs a C++17 compiler: install g++ or clang++", pytrace=False)
    return found


@pytest.mark.parametrize("sanitizers", SANITIZERS)
def test_sanitizers_find_nothing(compiler: str, sanitizers: str, tmp_path: pathlib.Path) -> None:
    sources = sorted(path for path in KERNELS.glob("*.cc") if not path.name.startswith("ffi_"))
    options = [
        *FLAGS,
        SANITIZERS[sanitizers],
        f"-fsanitize={sanitizers}",
        "-fno-sanitize-recover=all",
        f"-I{KERNELS}",
    ]

    def build(source: pathlib.Path) -> subprocess.Popen[bytes]:
        target = tmp_path / f"{source.stem}.o"
        return subprocess.Popen([compiler, *options, "-c", str(source), "-o", str(target)])

    test = ROOT / "tests" / "native" / "kernels_test.cc"
    compiling = [build(source) for source in (*sources, test)]
    assert [process.wait() for process in compiling] == [0] * len(compiling)
    program = tmp_path / "kernels_test"
    objects = sorted(map(str, tmp_path.glob("*.o")))
    subprocess.run([compiler, *options, *objects, "-o", str(program)], check=True)
    done = subprocess.run([program], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    assert "portable done" in done.stdout
