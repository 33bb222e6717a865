"""GGUF-02, -05, -11, CFG-05 and what else may differ between a file and a model."""

from __future__ import annotations

import dataclasses
import pathlib
import tempfile
import threading

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gguf_files import Tiny, hf_weights, write_gguf
from load_memory import load_growth
from tiny import HF_NAMES

from stoker.models import host_threads
from stoker.models.checkpoints.gguf import GGUFCheckpoint
from stoker.models.config import Kernels
from stoker.models.errors import StokerError
from stoker.models.families import FAMILIES, family_for
from stoker.models.families.gguf_config import model_config
from stoker.models.loading import check_tensors, load_model, load_params
from stoker.models.ops import cpu
from stoker.models.parameters import abstract_params, is_weight, named_parameters
from stoker.models.quantized import QuantArray, densify


def leaves_by_name(model):
    """Dotted path to weight, quantised ones whole."""
    paths = jax.tree_util.tree_leaves_with_path(model.params, is_leaf=is_weight)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in paths}


def hf_name(path: str) -> str:
    *layer, leaf = path.split(".")
    return f"model.layers.{layer[1]}.{HF_NAMES[leaf]}" if layer else HF_NAMES[leaf]


TINIES = {
    "llama": Tiny(),
    "tied": Tiny(tied=True),
    "bias": Tiny(biases=True),
    "wide_heads": Tiny(d_model=60, head_dim=16),
    "one_kv_head": Tiny(n_kv_heads=1),
    "qwen2": Tiny(architecture="qwen2", biases=True, tied=True, rope_theta=1e6),
}


@pytest.mark.parametrize("name", TINIES)
def test_every_parameter_has_its_hugging_face_value(name, tmp_path):
    tiny = TINIES[name]
    weights = hf_weights(tiny, seed=3)
    model = load_model(write_gguf(tmp_path / "m.gguf", tiny, weights))
    loaded = leaves_by_name(model)
    assert {hf_name(path) for path in loaded} == weights.keys()
    for path, leaf in loaded.items():
        assert isinstance(leaf, jax.Array)
        np.testing.assert_array_equal(leaf, weights[hf_name(path)])
    config = model.config
    assert config.family == tiny.architecture
    for field in ("vocab_size", "d_model", "n_layers", "n_heads", "n_kv_heads", "head_dim", "d_ff"):
        assert getattr(config, field) == getattr(tiny, field)
    assert config.max_positions == tiny.max_positions
    assert config.tied_head == tiny.tied and config.attention_bias == tiny.biases
    assert config.norm_eps == pytest.approx(tiny.norm_eps)
    assert config.rope.theta == tiny.rope_theta and config.rope.dims == tiny.head_dim
    assert model.tokenizer.vocab_size == tiny.vocab_size
    assert model.file_bytes == model.path.stat().st_size and model.load_seconds > 0


@pytest.mark.parametrize("kernels", ["xla", "cpu"])
@pytest.mark.parametrize("quantisation", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
@pytest.mark.parametrize("name", ["bias", "qwen2"])
def test_quantised_weights_are_moved_but_never_requantised(name, quantisation, kernels, tmp_path):
    tiny = TINIES[name]
    weights = hf_weights(tiny)
    path = write_gguf(tmp_path / "m.gguf", tiny, weights, quantisation=quantisation)
    model = load_model(path, kernels=kernels)
    kind = gguf.GGMLQuantizationType[quantisation]
    for path, leaf in leaves_by_name(model).items():
        want = weights[hf_name(path)]
        if want.ndim > 1:
            assert isinstance(leaf, QuantArray if kernels == "xla" else cpu.PackedArray)
            leaf = cpu.unpack(leaf) if kernels == "cpu" else leaf
            want = gguf.quants.dequantize(gguf.quants.quantize(want, kind), kind)
        np.testing.assert_array_equal(densify(leaf), want)


@pytest.mark.parametrize("precision", ["F16", "BF16"])
def test_dense_half_precision_stays_what_it_is(precision, tmp_path):
    weights = hf_weights(Tiny())
    model = load_model(write_gguf(tmp_path / "m.gguf", Tiny(), weights, quantisation=precision))
    dtype = {"F16": jnp.float16, "BF16": jnp.bfloat16}[precision]
    for path, leaf in leaves_by_name(model).items():
        assert leaf.dtype == (dtype if leaf.ndim > 1 else jnp.float32)
        np.testing.assert_array_equal(leaf, weights[hf_name(path)].astype(leaf.dtype))


def test_vectors_of_half_precision_become_float32(tmp_path):
    tiny = TINIES["bias"]
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    source = GGUFCheckpoint.open(write_gguf(tmp_path / "source.gguf", tiny))
    for key, value in source.metadata.items():
        if key != "general.architecture":
            writer.add_key_value(key, value, *_types(value))
    for name, info in source.tensors.items():
        values = source.read(name).view(np.float32).reshape(info.shape)
        writer.add_tensor(name, values if values.ndim > 1 else values.astype(np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    for leaf in jax.tree.leaves(load_model(path).params):
        assert leaf.dtype == jnp.float32


def _types(value):
    kind = gguf.GGUFValueType.get_type(value)
    return (kind, gguf.GGUFValueType.get_type(value[0])) if isinstance(value, list) else (kind,)


def test_a_split_model_loads_like_the_whole_file(tmp_path):
    whole = load_model(write_gguf(tmp_path / "m.gguf", Tiny()))
    first = write_gguf(tmp_path / "s.gguf", Tiny(), shard_tensors=9)
    last = first.with_name("s-00003-of-00003.gguf")
    for path in (first, last):
        split = load_model(path)
        assert split.path == first and split.config == whole.config
        for one, other in zip(
            jax.tree.leaves(split.params), jax.tree.leaves(whole.params), strict=True
        ):
            np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("dims", [4, 8, 16])
def test_reordered_rows_rotate_like_the_files_pairs(dims):
    """Rotating (2i, 2i + 1) in file order equals rotating (i, i + dims/2) after reordering."""
    heads, width = 3, 16
    path = "layers.0.k"
    config = dataclasses.replace(
        _config(Tiny(d_model=48, n_heads=3, n_kv_heads=3, head_dim=width)),
        rope=dataclasses.replace(_config(Tiny()).rope, dims=dims),
    )
    order = FAMILIES["llama"].gguf.row_order(path, config)
    assert sorted(order) == list(range(heads * width))
    x = np.random.default_rng(0).normal(size=(heads, width))
    angle = 0.7 * np.arange(1, dims // 2 + 1)
    paired = x.copy()
    even, odd = x[:, 0:dims:2], x[:, 1:dims:2]
    paired[:, 0:dims:2] = even * np.cos(angle) - odd * np.sin(angle)
    paired[:, 1:dims:2] = even * np.sin(angle) + odd * np.cos(angle)
    halves = x.reshape(-1)[order].reshape(heads, width)
    left, right = halves[:, : dims // 2].copy(), halves[:, dims // 2 : dims].copy()
    halves[:, : dims // 2] = left * np.cos(angle) - right * np.sin(angle)
    halves[:, dims // 2 : dims] = left * np.sin(angle) + right * np.cos(angle)
    np.testing.assert_allclose(halves, paired.reshape(-1)[order].reshape(heads, width))
    assert FAMILIES["qwen2"].gguf.row_order(path, config) is None
    assert FAMILIES["llama"].gguf.row_order("layers.0.v", config) is None


def _config(tiny, **metadata):
    """The configuration that a file with these keys has."""
    with tempfile.TemporaryDirectory() as folder:
        path = write_gguf(pathlib.Path(folder) / "m.gguf", tiny, metadata=metadata)
        checkpoint = GGUFCheckpoint.open(path)
        return model_config(family_for(checkpoint.metadata["general.architecture"]), checkpoint)


def test_head_width_falls_back_to_the_models_width():
    none = {"llama.attention.key_length": None, "llama.attention.value_length": None}
    rope = {"llama.rope.dimension_count": None}
    assert _config(Tiny(), **none, **rope).head_dim == 8
    assert _config(Tiny(d_model=60, head_dim=16)).head_dim == 16


def test_defaults_are_those_of_the_format():
    config = _config(
        Tiny(n_kv_heads=8),
        **{"llama.attention.head_count_kv": None, "llama.rope.freq_base": None},
    )
    assert config.n_kv_heads == 8 and config.rope.theta == 10000.0
    assert config.rope.scale == 1.0 and config.rope.factors == ()


@pytest.mark.parametrize(
    "metadata, scale",
    [
        ({"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}, 4.0),
        ({"llama.rope.scaling.factor": 4.0}, 4.0),
        ({"llama.rope.scale_linear": 2.0}, 2.0),
        ({"llama.rope.scaling.type": "none", "llama.rope.scaling.factor": 4.0}, 1.0),
        ({}, 1.0),
    ],
)
def test_linear_rope_scaling(metadata, scale):
    assert _config(Tiny(), **metadata).rope.scale == scale


def test_rope_factors_come_from_their_tensor(tmp_path):
    factors = np.array([1.0, 1.5, 4.0, 8.0], np.float32)
    path = write_gguf(tmp_path / "m.gguf", Tiny(), tensors={"rope_freqs.weight": factors})
    model = load_model(path)
    assert model.config.rope.factors == (1.0, 1.5, 4.0, 8.0)
    assert model.config.rope.frequencies()[2] == pytest.approx(10000 ** (-4 / 8) / 4)


def test_a_window_is_on_every_layer_but_one_that_is_never_reached_is_none():
    assert _config(Tiny(), **{"llama.attention.sliding_window": 256}).kinds == ()
    kinds = _config(Tiny(), **{"llama.attention.sliding_window": 32}).kinds
    assert [kind.window for kind in kinds] == [32, 32]


def test_qwen2_reads_its_own_keys(tmp_path):
    tiny = TINIES["qwen2"]
    own = {"qwen2.context_length": 64, "llama.context_length": 4096}
    path = write_gguf(tmp_path / "m.gguf", tiny, metadata=own)
    assert load_model(path).config.max_positions == 64
    path = write_gguf(tmp_path / "n.gguf", tiny, metadata={"qwen2.block_count": None})
    with pytest.raises(StokerError, match=r"'qwen2\.block_count' is missing"):
        load_model(path)


def test_a_separate_head_is_used_and_an_absent_one_is_the_embedding(tmp_path):
    tied = load_model(write_gguf(tmp_path / "tied.gguf", Tiny(tied=True)))
    assert tied.config.tied_head and "head" not in tied.params
    own = load_model(write_gguf(tmp_path / "own.gguf", Tiny()))
    assert not own.config.tied_head
    assert not np.array_equal(own.params["head"], own.params["embedding"])


def test_padding_rows_of_the_embedding_are_allowed(tmp_path):
    padded = np.ones((640, 64), np.float32)
    tensors = {"token_embd.weight": padded, "output.weight": padded}
    model = load_model(write_gguf(tmp_path / "m.gguf", Tiny(), tensors=tensors))
    assert (model.config.vocab_size, model.tokenizer.vocab_size) == (640, 512)


def test_compute_type(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", Tiny())
    assert load_model(path).config.dtype == "float32"
    assert load_model(path, dtype="bfloat16").config.compute_dtype == jnp.bfloat16
    with pytest.raises(StokerError, match="dtype 'int4'"):
        load_model(path, dtype="int4")


def test_each_leaf_is_placed_by_the_caller_and_progress_is_told(tmp_path):
    checkpoint = GGUFCheckpoint.open(
        write_gguf(tmp_path / "m.gguf", TINIES["bias"], quantisation="Q8_0")
    )
    family = family_for("llama")
    config = model_config(family, checkpoint)
    check_tensors(checkpoint, family, config)
    placed, told = [], []

    def place(path, leaf):
        placed.append(path)
        return jax.device_put(leaf)

    params = load_params(
        checkpoint, family, config, place=place, progress=lambda *pair: told.append(pair)
    )
    assert set(placed) == {path for path, _ in named_parameters(abstract_params(config))}
    assert len(placed) == len(jax.tree.leaves(params))
    assert told == sorted(told) and told[-1][0] == told[-1][1]
    assert told[-1][1] == sum(info.nbytes for info in checkpoint.tensors.values())


@pytest.mark.parametrize("kernels", ["xla", "cpu"])
def test_threads_load_what_one_does_where_the_caller_wants_it(
    kernels, tmp_path, monkeypatch, many_switches
):
    """`jax.default_device` is a context of the caller's own thread."""
    checkpoint = GGUFCheckpoint.open(write_gguf(tmp_path / "m.gguf", Tiny(), quantisation="Q4_1"))
    family = family_for("llama")
    config = dataclasses.replace(model_config(family, checkpoint), kernels=Kernels(kernels))
    found = []
    for cores in (1, 8):
        monkeypatch.setattr(host_threads, "usable_cores", lambda cores=cores: cores)
        with jax.default_device(jax.devices()[0]):
            devices, threads = set(), set()

            def place(_, leaf, devices=devices, threads=threads):
                devices.add(jax.config.jax_default_device)
                threads.add(threading.get_ident())
                return jax.device_put(leaf)

            found.append(load_params(checkpoint, family, config, place=place))
        assert devices == {jax.devices()[0]}
        assert (threading.get_ident() in threads) == (cores == 1)
    for one, many in zip(*map(jax.tree.leaves, found), strict=True):
        np.testing.assert_array_equal(one, many)


def test_smollm2(smollm2):
    config = smollm2.config
    sizes = (config.vocab_size, config.d_model, config.n_layers, config.n_heads, config.n_kv_heads)
    assert sizes == (49152, 576, 30, 9, 3)
    assert config.tied_head and config.max_positions == 8192 and config.rope.theta == 100000
    assert smollm2.tokenizer.vocab_size == 49152
    checkpoint = GGUFCheckpoint.open(smollm2.path)
    for name, weight in (
        ("blk.7.attn_q.weight", smollm2.params["layers"][7]["q"]),
        ("blk.29.ffn_down.weight", smollm2.params["layers"][29]["down"]),
        ("token_embd.weight", smollm2.params["embedding"]),
    ):
        info = checkpoint.tensors[name]
        blocks = checkpoint.read(name).reshape(info.shape[0], -1)[:192]
        want = gguf.quants.dequantize(blocks, info.type)
        if "attn_q" in name:
            want = want.reshape(3, 32, 2, 576).swapaxes(1, 2).reshape(192, 576)
        np.testing.assert_array_equal(densify(weight[np.arange(192)]), want)


@pytest.mark.parametrize("kernels", ["xla", "cpu"])
def test_loading_takes_little_more_memory_than_the_file(smollm2_path, kernels):
    grown, file_bytes = load_growth(smollm2_path, kernels)
    # The parameters alone are nearly the file's size: less would mean a broken measurement.
    assert 0.9 * file_bytes < grown < 1.6 * file_bytes, (
        f"{grown / 1e6:.0f} MB for a file of {file_bytes / 1e6:.0f} MB"
    )
