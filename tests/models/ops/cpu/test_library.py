"""Finding the library, doing without it, and running it on a mesh."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
import tomllib

import pytest
from packaging.requirements import Requirement

from stoker.models.ops import cpu
from stoker.models.ops.cpu import library

ROOT = pathlib.Path(__file__).parents[4]

ON_FOUR_DEVICES = """
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import PartitionSpec as P
from quantised import random_quant
from stoker.models.ops import Layout, cpu

assert jax.device_count() == 4
mesh = jax.make_mesh((4,), ("tensor",), axis_types=(jax.sharding.AxisType.Auto,))
x = jnp.asarray(np.random.default_rng(0).normal(size=(9, 512)), jnp.float32)
packed = cpu.pack(random_quant("q4_k", 128))
want = cpu.matmul(x, packed)

def shard(specs_in, specs_out):
    return lambda f: jax.jit(
        jax.shard_map(f, mesh=mesh, in_specs=specs_in, out_specs=specs_out, check_vma=False)
    )

rows = jax.tree.map(lambda _: P("tensor"), packed)
for _ in range(20):
    got = shard((P(), rows), P(None, "tensor"))(cpu.matmul)(x, packed)
    np.testing.assert_array_equal(got, want)

# Two factors of scales do not split by four: multiply them out.
array = random_quant("q4_k", 64)
scale, minimum = (np.repeat(np.float32(factor), 8, -1) * values for factor, values in
                  ((array.super_scale, array.scale), (array.super_minimum, array.minimum)))
packed = cpu.pack(array.replace(scale=scale, minimum=minimum, super_scale=None, super_minimum=None))
columns = jax.tree.map(lambda _: P(None, "tensor"), packed)
summed = shard((P(None, "tensor"), columns), P())(
    lambda x, w: jax.lax.psum(cpu.matmul(x, w), "tensor")
)
want = np.asarray(cpu.matmul(x, packed))
np.testing.assert_allclose(summed(x, packed), want, atol=1e-5 * np.abs(want).max())

q, k, v = (jnp.asarray(np.random.default_rng(i).normal(size=(5, n, 16)), jnp.float32)
           for i, n in enumerate((8, 4, 4)))
pages = jnp.zeros((3, 4, 16, 16))
layout = Layout(*(jnp.asarray(a, jnp.int32) for a in ([0, 5], [5], [[1, 2]])), 5)
attend = lambda *a: cpu.attention(*a, scale=0.25)
heads, cells = P(None, "tensor"), P(None, "tensor")
sharded = shard((heads, heads, heads, cells, cells, P()), (heads, cells, cells))(attend)
for got, want in zip(sharded(q, k, v, pages, pages, layout), attend(q, k, v, pages, pages, layout)):
    np.testing.assert_array_equal(got, want)
"""


def test_kernels_are_loaded_and_ordered() -> None:
    found = cpu.load()
    assert found is not None, cpu.why_unavailable()
    assert found is cpu.load()
    assert found.best == found.isas[-1]
    assert found.isas == library.ISAS[1 : 1 + len(found.isas)]
    assert cpu.why_unavailable() is None


def test_without_a_library(tmp_path: pathlib.Path) -> None:
    reason = library.open_library(tmp_path)
    assert isinstance(reason, str)
    assert "were not compiled when Stoker was installed; install a C++17 compiler" in reason


def test_with_a_library_that_cannot_be_read(tmp_path: pathlib.Path) -> None:
    (tmp_path / "stoker_cpu.abi3.so").write_bytes(b"not a library")
    reason = library.open_library(tmp_path)
    assert isinstance(reason, str)
    assert "stoker_cpu.abi3.so cannot be used" in reason
    assert "--no-build-isolation" in reason
    assert "\n" not in reason


def test_the_warning_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "_load", lambda: "the reason")
    assert library.load() is None
    assert "slow reference, since the reason" in str(library.why_unavailable())


def test_kernels_are_compiled_with_the_oldest_headers() -> None:
    # An older jaxlib refuses what newer headers made; a newer one takes what older ones made.
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wanted = map(Requirement, project["project"]["dependencies"])
    (supported,) = (each.specifier for each in wanted if each.name == "jax")
    # For later versions of Python, the oldest JAX has no wheels.
    oldest = {"python_version": "3.14"}
    built = map(Requirement, project["build-system"]["requires"])
    (headers,) = (
        each.specifier
        for each in built
        if each.name == "jax" and (not each.marker or each.marker.evaluate(oldest))
    )
    assert "0.10.2" in supported and "0.9.9" not in supported
    assert "0.10.2" in headers and "0.11.0" not in headers


def test_no_compiler_is_no_failure(tmp_path: pathlib.Path) -> None:
    command = [sys.executable, "setup.py", "build_ext", "--build-lib", str(tmp_path / "lib")]
    missing = {"CC": "no-such-compiler", "CXX": "no-such-compiler"}
    done = subprocess.run(
        [*command, "--build-temp", str(tmp_path / "temp")],
        cwd=ROOT,
        env=os.environ | missing,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert not list(tmp_path.rglob("*.so"))


def test_on_forced_host_devices(helpers_on_path: dict[str, str]) -> None:
    environment = helpers_on_path | {"XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
    done = subprocess.run(
        [sys.executable, "-c", ON_FOUR_DEVICES],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
