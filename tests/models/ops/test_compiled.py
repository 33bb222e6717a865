"""What the TPU and GPU compilers make of the kernels: no copy of a cache, no dense weights.

Nothing runs here. `pytest -m compile` selects these; see `tests/helpers/targets.py`.
"""

from __future__ import annotations

import math
import pathlib
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from targets import TARGETS, TPUS, Compiled, compile_for, platform_of

from stoker.models import ops
from stoker.models.config import Kernels
from stoker.models.ops.quant_pages import QuantPages, tpu_value_shape
from stoker.models.quantized import E2M1, QuantArray, ready

pytestmark = pytest.mark.compile
#: Sequences, pages of each, pages of the pool.
SLOTS, PAGES, POOL = 32, 16, 4097


def struct(*shape: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def attention(
    target: str, rows: int, most: int, *, N: int, K: int, H: int, pages: str, **options: Any
) -> tuple[Compiled, int]:
    """A step's attention, compiled, and the bytes of its pages."""
    tpu = platform_of(target) == "tpu"
    Z = 128 if tpu else 64
    values = tpu_value_shape(Z, H) if tpu else (Z, H)

    def pool(*shape: int) -> Any:
        codes = struct(POOL, K, *shape, dtype=jnp.dtype(pages))
        return (
            QuantPages(codes, struct(POOL, K, Z, dtype=jnp.float32)) if pages == "int8" else codes
        )

    def attend(*arrays: Any) -> Any:
        q, k, v, k_pages, v_pages, starts, lens, table, cos, sin = arrays
        return ops.attention(
            *(q, k, v, k_pages, v_pages, ops.Layout(starts, lens, table, most)),
            Kernels(platform_of(target)),
            turn=(cos, sin),
            scale=H**-0.5,
            **options,
        )

    whole = [struct(SLOTS + 1), struct(SLOTS), struct(SLOTS, PAGES)]
    integers = [struct(*part.shape, dtype=jnp.int32) for part in whole]
    turn = [struct(rows, H // 2, dtype=jnp.float32)] * 2
    arrays = (struct(rows, N, H), *[struct(rows, K, H)] * 2, pool(H, Z), pool(*values))
    program = compile_for(target, attend, *arrays, *integers, *turn, donate=(3, 4))
    return program, sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(arrays[3:]))


def check_attention(target: str, program: Compiled, pool_bytes: int) -> None:
    # TPU memory is tiled: what is aliased may be more than the numbers alone.
    assert program.aliased >= pool_bytes
    assert program.temporary < pool_bytes / 8
    assert program.kernels("stoker_attention")


@pytest.mark.parametrize("pages", ["bfloat16", "int8", "float8_e4m3fn"])
@pytest.mark.parametrize("target", TARGETS)
def test_pages_are_written_in_place(target: str, pages: str) -> None:
    for rows, most, window in ((SLOTS, 1, 0), (544, 512, 1000)):
        sizes: dict[str, Any] = {"N": 32, "K": 8, "H": 128}
        check_attention(target, *attention(target, rows, most, pages=pages, window=window, **sizes))


@pytest.mark.parametrize("head_dim", [64, 80, 96, 256])
@pytest.mark.parametrize("target", ["v5e", "h200"])
def test_heads_of_every_width(target: str, head_dim: int) -> None:
    sizes: dict[str, Any] = {"N": 16, "K": 16, "H": head_dim}
    program, pool_bytes = attention(target, SLOTS, 1, pages="bfloat16", softcap=30.0, **sizes)
    check_attention(target, program, pool_bytes)


def quantised(target: str, E: int, kind: str, R: int = 4096, C: int = 4096) -> QuantArray:
    """The shapes of a matrix, or of E, as the target's kernels get it."""
    half = jnp.int16 if target in TPUS else jnp.float16
    lead = (E,) if E else ()
    byte, four = struct(*lead, R, C, dtype=jnp.int8), struct(*lead, R, C // 2, dtype=jnp.uint8)
    thirty_two = struct(*lead, R, C // 32, dtype=half)
    if kind == "int8":
        return QuantArray(byte, thirty_two, bits=8, group=32)
    if kind == "int4":
        return QuantArray(four, thirty_two, thirty_two, bits=4, group=32)
    if kind == "awq":
        groups = struct(*lead, R, C // 128, dtype=half)
        return QuantArray(four, groups, groups, bits=4, group=128)
    if kind == "q4_k":
        scale = struct(*lead, R, C // 32, dtype=jnp.uint8)
        factor = struct(*lead, R, C // 256, dtype=half)
        return QuantArray(four, scale, scale, factor, factor, bits=4, group=32)
    if kind == "mxfp4":
        scale = struct(*lead, R, C // 32, dtype=jnp.float8_e8m0fnu)
        return QuantArray(four, scale, bits=4, group=32, levels=E2M1)
    assert kind == "float8"
    codes = struct(*lead, R, C, dtype=jnp.float8_e4m3fn)
    return QuantArray(codes, struct(*lead, R, C // 128, dtype=jnp.float32), bits=8, group=128)


def check_product(program: Compiled, weight: Any, kernel: str) -> None:
    """No array of dense weights, whatever axes it has, and no copy of the codes."""
    assert program.kernels(kernel)
    size = math.prod(weight.shape)
    for dtype, axes in re.findall(r"= (bf16|f32)\[([\d,]+)\]", program.text):
        if isinstance(weight, QuantArray):
            assert math.prod(map(int, axes.split(","))) < size, f"{dtype}[{axes}] is dense"
    assert program.temporary < size / 2
    assert not re.search(r"= [us]8\[[\d,]*4096,\d+\]\S* (copy|bitcast-convert)\(", program.text)


@pytest.mark.parametrize("kind", ["int8", "int4", "q4_k", "mxfp4", "float8"])
@pytest.mark.parametrize("target", TARGETS)
def test_weights_are_widened_inside_the_product(target: str, kind: str) -> None:
    for rows in (8, 64):
        weight = quantised(target, 0, kind)

        def matmul(x: jax.Array, weight: QuantArray) -> jax.Array:
            return ops.matmul(x, weight, Kernels(platform_of(target)))

        program = compile_for(target, matmul, struct(rows, 4096), weight)
        check_product(program, weight, "stoker_matmul")


@pytest.mark.parametrize("target", TARGETS)
def test_rows_of_prefill_meet_integers(target: str, tmp_path: pathlib.Path) -> None:
    weight = quantised(target, 0, "awq")

    def matmul(x: jax.Array, weight: QuantArray) -> jax.Array:
        return ops.matmul(x, weight, Kernels(platform_of(target), "int8"))

    gpu = platform_of(target) == "gpu"
    options = {"xla_dump_to": str(tmp_path)} if gpu else None
    program = compile_for(target, matmul, struct(512, 4096), weight, options=options)
    check_product(program, weight, "stoker_integer_matmul")
    # The activations are never copied as floats: they become integers where they lie.
    assert not re.search(r"= (bf16|f32)\[512,4096\]\S* copy\(", program.text)
    if gpu:
        assembly = "".join(path.read_text() for path in tmp_path.glob("*.ptx"))
        assert "wgmma.mma_async.sync.aligned.m64n64k32.s32.s8.s8" in assembly


@pytest.mark.parametrize("target", ["v5e"])
def test_rows_of_codes_that_fill_no_register_are_not_copied(target: str) -> None:
    plain = quantised(target, 0, "int4", R=1536, C=576)
    zeros = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), plain)
    weight = ready(zeros)

    def matmul(x: jax.Array, weight: QuantArray) -> jax.Array:
        return ops.matmul(x, weight, Kernels(platform_of(target)))

    codes = re.compile(r"= u8\[1536,\d+\]\S* copy\(")
    for one, copied in ((zeros, True), (weight, False)):
        program = compile_for(target, matmul, struct(8, 576), one)
        assert bool(codes.search(program.text)) == copied


@pytest.mark.parametrize("kind", ["int4", "bfloat16"])
@pytest.mark.parametrize("target", TARGETS)
def test_experts_are_read_where_they_lie(target: str, kind: str) -> None:
    weight = struct(8, 4096, 2048) if kind == "bfloat16" else quantised(target, 8, kind, C=2048)

    def grouped(x: jax.Array, weight: Any, sizes: jax.Array) -> jax.Array:
        return ops.grouped_products(x, [weight], sizes, Kernels(platform_of(target)))[0]

    args = (struct(64, 2048), weight, struct(8, dtype=jnp.int32))
    check_product(compile_for(target, grouped, *args), weight, "stoker_grouped_matmul")
