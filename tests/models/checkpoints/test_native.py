"""Stoker's own checkpoints hold what was loaded; damage, of any kind, is refused by name."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import shutil
import types

import jax
import numpy as np
import pytest
import safetensors.numpy
from gguf_files import Tiny, write_gguf
from safetensors.numpy import load_file
from tiny import variant

from stoker.models.checkpoints import converting
from stoker.models.checkpoints.config_json import config_from_json, config_to_json
from stoker.models.checkpoints.converting import convert_model
from stoker.models.config import LayerKind, Rope
from stoker.models.errors import StokerError
from stoker.models.loading import Model, load_model
from stoker.models.quantise import relative_error
from stoker.models.quantized import QuantArray, densify


def assert_same(one: Model, other: Model) -> None:
    assert one.config == other.config
    assert jax.tree.structure(one.params) == jax.tree.structure(other.params)
    for a, b in zip(jax.tree.leaves(one.params), jax.tree.leaves(other.params), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)
    text = "the theme of 123 anthems"
    assert one.tokenizer.encode(text) == other.tokenizer.encode(text)
    assert one.tokenizer.stop_ids == other.tokenizer.stop_ids
    assert one.tokenizer.chat_template == other.tokenizer.chat_template


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> pathlib.Path:
    path = tmp_path_factory.mktemp("source") / "m.gguf"
    metadata = {"tokenizer.chat_template": "{{ messages }}"}
    return write_gguf(path, Tiny(biases=True, architecture="qwen2"), metadata=metadata)


@pytest.fixture
def native(source, tmp_path) -> pathlib.Path:
    return convert_model(source, tmp_path / "native", quantize="int4").path


@pytest.mark.parametrize("kernels", ["xla", "cpu"])
@pytest.mark.parametrize(
    ("quantisation", "quantize"),
    [("F32", None), ("BF16", None), ("Q4_1", None), ("F32", "int8"), ("F16", "int4:group=40")],
)
def test_what_is_read_is_what_was_loaded(quantisation, quantize, kernels, tmp_path):
    path = write_gguf(tmp_path / "m.gguf", Tiny(), quantisation=quantisation)
    done = convert_model(path, tmp_path / "out", quantize=quantize, shard_bytes=50_000)
    assert len(list(done.path.glob("model-*-of-*.safetensors"))) > 1
    assert_same(
        load_model(done.path, kernels=kernels), load_model(path, quantize=quantize, kernels=kernels)
    )
    again = convert_model(done.path, tmp_path / "again")
    assert_same(load_model(again.path, kernels=kernels), load_model(done.path, kernels=kernels))
    assert sorted(file.name for file in again.path.iterdir()) == [
        "model.safetensors",
        "stoker.json",
        "tokenizer",
    ]


def test_quantised_matrices_can_be_made_dense_and_quantised_again(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", Tiny(), quantisation="Q4_1")
    whole = load_model(path, kernels="xla").params["layers"][1]["down"]
    assert isinstance(whole, QuantArray)
    dense = load_model(convert_model(path, tmp_path / "dense", dtype="float32").path)
    np.testing.assert_array_equal(dense.params["layers"][1]["down"], densify(whole))
    half = load_model(convert_model(path, tmp_path / "half", dtype="bfloat16").path)
    assert half.params["embedding"].dtype == "bfloat16"
    done = convert_model(path, tmp_path / "int8", dtype="float32", quantize="int8")
    again = load_model(done.path, kernels="xla").params["layers"][1]["down"]
    assert again.bits == 8
    assert relative_error(np.asarray(densify(whole)), np.asarray(densify(again))) < 0.01


def test_the_files_are_what_other_readers_expect(native):
    arrays = load_file(native / "model.safetensors")
    values = json.loads((native / "stoker.json").read_text())
    assert arrays["layers.1.q.codes"].dtype == np.uint8
    assert arrays["layers.1.q.scale"].dtype == np.float16
    assert values["parameters"]["layers.1.q"]["group"] == 32
    assert arrays.keys() == {
        f"{path}.{leaf}" if leaf else path
        for path, entry in values["parameters"].items()
        for leaf in entry.get("leaves", {"": None})
    }


def rope(**fields) -> Rope:
    return Rope(1e4, 8, **fields)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"rope": rope(scale=2.0, factors=(1.0, 2.0, 3.0, 4.0))},
        {"rope": rope(long_factors=(1.5,) * 4, original=32)},
        {"local_rope": rope(), "kinds": (LayerKind(16, "local"), LayerKind())},
        {"n_experts": 4, "experts_per_token": 2, "logit_softcap": 30.0, "attention_scale": 0.5},
    ],
)
def test_a_configuration_survives_json(changes):
    config = dataclasses.replace(variant("plain"), **changes)
    assert config_from_json(json.loads(json.dumps(config_to_json(config)))) == config


def edit(native: pathlib.Path, *keys: str, value) -> None:
    """Changes what `stoker.json` has under keys, one inside the other; ... removes it."""
    values = json.loads((native / "stoker.json").read_text())
    node = values
    for key in keys[:-1]:
        node = node[key]
    if value is ...:
        del node[keys[-1]]
    else:
        node[keys[-1]] = value
    (native / "stoker.json").write_text(json.dumps(values))


@pytest.mark.parametrize(
    ("keys", "value", "message"),
    [
        (("version",), 2, "version is 2"),
        (("format",), "other", "format"),
        (("storage",), "zip", "storage 'zip'"),
        (("novel",), 1, "does not know its 'novel'"),
        (("config",), ..., "lacks 'config'"),
        (("config", "novelty"), 1, "the field 'novelty'"),
        (("config", "d_model"), ..., "lacks the field 'd_model'"),
        (("config", "d_model"), "64", "config.d_model is '64'"),
        (("config", "n_layers"), 1 << 40, "config.n_layers is 1099511627776"),
        (("config", "dtype"), "float32", "config.dtype"),
        (("config", "rope", "theta"), None, "config.rope.theta"),
        (("config", "family"), "unheard", "the family is 'unheard'"),
        (("parameters", "layers.1.q"), ..., "lacks the parameter 'layers.1.q'"),
        (("parameters", "layers.2.q"), {"dtype": "int8", "shape": [1]}, "parameter 'layers.2.q'"),
        (("parameters", "layers.1.q", "novel"), 1, "'layers.1.q' has leaves or fields"),
        (("parameters", "layers.1.q", "group"), 16, "'layers.1.q' has codes"),
        (("parameters", "layers.1.q", "bits"), 3, "'layers.1.q' has codes"),
        (("parameters", "layers.1.q_bias", "shape"), [32], "'layers.1.q_bias' of the checkpoint"),
        (("parameters", "final_norm", "dtype"), "float16", "'final_norm' of the checkpoint is"),
        (("parameters", "final_norm", "dtype"), "int99", "'final_norm' has an array"),
        (("parameters", "layers.1.q", "leaves", "scale", "dtype"), "float32", "q.scale' of the"),
        (("parameters", "layers.1.q", "leaves", "scale"), ..., "'layers.1.q' has leaves"),
    ],
)
def test_what_stoker_json_must_not_say(native, keys, value, message):
    edit(native, *keys, value=value)
    with pytest.raises(StokerError, match=message) as raised:
        load_model(native)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda arrays: arrays.pop("layers.0.k.scale"), "lacks the array 'layers.0.k.scale'"),
        (lambda arrays: arrays.update(more=np.ones(3)), "the array 'more'"),
        (
            lambda arrays: arrays.update({"layers.0.k.codes": arrays["layers.0.k.codes"].T.copy()}),
            r"'layers.0.k.codes' of the checkpoint has the shape \[32, 16\], its transpose",
        ),
        (
            lambda arrays: arrays.update(final_norm=arrays["final_norm"].astype(np.float16)),
            "'final_norm' of the checkpoint is float16",
        ),
    ],
)
def test_arrays_that_do_not_fit_are_named(native, change, message):
    arrays = load_file(native / "model.safetensors")
    change(arrays)
    if "more" in arrays:
        arrays["more"] = arrays["more"].astype(np.float32)
    safetensors.numpy.save_file(arrays, native / "model.safetensors")
    with pytest.raises(StokerError, match=message):
        load_model(native)


def test_a_folder_that_holds_something_is_replaced_only_if_asked(source, tmp_path):
    (tmp_path / "out").mkdir()
    done = convert_model(source, tmp_path / "out")
    with pytest.raises(StokerError, match="or --overwrite"):
        convert_model(source, done.path)
    before = (done.path / "stoker.json").stat().st_ino
    convert_model(source, done.path, overwrite=True)
    assert (done.path / "stoker.json").stat().st_ino != before
    assert [file.name for file in tmp_path.iterdir()] == ["out"]


def test_what_no_conversion_wrote_is_never_replaced(source, tmp_path):
    done = convert_model(source, tmp_path / "out").path
    (done / "mine").write_text("kept")
    with pytest.raises(StokerError, match="it holds 'mine'"):
        convert_model(source, done, overwrite=True)
    for target in (tmp_path, done / "mine"):
        with pytest.raises(StokerError, match="not what a conversion wrote"):
            convert_model(source, target, overwrite=True)
    assert (done / "mine").read_text() == "kept"


def test_tokens_without_rows_are_refused(tmp_path):
    cut = np.ones((500, 64), np.float32)
    tensors = {"token_embd.weight": cut, "output.weight": cut}
    path = write_gguf(tmp_path / "m.gguf", Tiny(), tensors=tensors)
    with pytest.raises(StokerError, match="512 tokens but its embedding only 500 rows"):
        convert_model(path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_interruption_leaves_nothing(source, tmp_path):
    def stop(done: int, total: int) -> None:
        if done > total / 2:
            raise KeyboardInterrupt

    kept = convert_model(source, tmp_path / "out").path
    before = sorted(kept.rglob("*"))
    with pytest.raises(KeyboardInterrupt):
        convert_model(source, kept, overwrite=True, progress=stop)
    with pytest.raises(KeyboardInterrupt):
        convert_model(source, tmp_path / "other", progress=stop)
    assert [file.name for file in tmp_path.iterdir()] == ["out"]
    assert sorted(kept.rglob("*")) == before


def test_a_full_disk_is_told_before_anything_is_written(source, tmp_path, monkeypatch):
    usage = types.SimpleNamespace(free=10_000)
    monkeypatch.setattr(converting.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(StokerError, match=r"is full: the model needs 0\.00 GB"):
        convert_model(source, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_a_lost_tokenizer_is_missed(native):
    shutil.rmtree(native / "tokenizer")
    with pytest.raises(StokerError, match=r"has no tokenizer.json"):
        load_model(native)


@pytest.mark.parametrize("options", [{"to": "zip"}, {"dtype": "int8"}, {"quantize": "int3"}])
def test_options_are_checked(source, tmp_path, options):
    with pytest.raises(StokerError, match="is not known"):
        convert_model(source, tmp_path / "out", **options)
