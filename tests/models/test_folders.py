"""A model folder as Hugging Face lays it out: what is read from which file, and what is refused."""

from __future__ import annotations

import contextlib
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hf_models import SIZES, Case, edit_json, make, write
from load_memory import load_growth
from running import CASES
from safetensors.numpy import load_file, save_file

from stoker.launch import generate
from stoker.models.errors import StokerError
from stoker.models.families import family_of_type
from stoker.models.families.hf_config import ConfigJson, model_config, rope_settings
from stoker.models.families.hf_config import rope as rope_of
from stoker.models.loading import load_model
from stoker.models.parameters import abstract_params

pytestmark = pytest.mark.reference


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A tiny Llama's folder, which tests copy."""
    return write(make(Case("Llama")), tmp_path_factory.mktemp("saved"))


@pytest.fixture
def folder(saved, tmp_path):
    for path in saved.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    return tmp_path


def leaves(model):
    return jax.tree.leaves(model.params)


def test_shards_give_what_the_whole_file_gives(tmp_path, folder):
    model = make(Case("Llama"))
    split = write(model, tmp_path / "split", max_shard_size="60KB")
    assert len(list(split.glob("*.safetensors"))) > 2
    whole, parts = load_model(folder), load_model(split)
    assert whole.config == parts.config and parts.path == split
    assert parts.file_bytes == sum(path.stat().st_size for path in split.glob("*.safetensors"))
    for one, other in zip(leaves(whole), leaves(parts), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("kernels", ["xla", "cpu"])
def test_half_precision_stays_what_it_is(dtype, kernels, tmp_path):
    import torch

    model = make(Case("Llama")).to(getattr(torch, dtype))
    loaded = load_model(write(model, tmp_path), kernels=kernels)
    want = model.state_dict()["model.layers.1.mlp.down_proj.weight"].float().numpy()
    got = loaded.params["layers"][1]["down"]
    assert got.dtype == dtype and loaded.params["layers"][1]["mlp_norm"].dtype == jnp.float32
    np.testing.assert_array_equal(np.asarray(got, np.float32), want)


def change_tensors(folder, **changes):
    """Adds tensors to the file, or takes out those of value None; dots are written as `__`."""
    path = folder / "model.safetensors"
    tensors = load_file(path) | {name.replace("__", "."): v for name, v in changes.items()}
    save_file({name: v for name, v in tensors.items() if v is not None}, path)


TENSORS = {
    "extra": ({"model__layers__0__foo__weight": np.ones(4, np.float32)}, "layers.0.foo.weight"),
    "missing": ({"model__layers__1__mlp__up_proj__weight": None}, "layers.1.mlp.up_proj.weight"),
    "one_bias": (
        {"model__layers__1__self_attn__k_proj__bias": np.ones(16, np.float32)},
        "lacks tensors 'model.layers.0.self_attn.k_proj.bias'",
    ),
    "shape": ({"model__norm__weight": np.ones(63, np.float32)}, "needs [64]"),
    "head": ({"lm_head__weight": None}, "lacks tensor 'lm_head.weight'"),
}


@pytest.mark.parametrize("case", TENSORS)
def test_a_tensor_that_does_not_fit_is_named(case, folder):
    changes, reason = TENSORS[case]
    change_tensors(folder, **changes)
    with pytest.raises(StokerError) as caught:
        load_model(folder)
    assert reason in str(caught.value)


def test_frequencies_that_old_files_hold_are_not_needed(folder):
    inv_freq = {"model__layers__0__self_attn__rotary_emb__inv_freq": np.ones(4, np.float32)}
    change_tensors(folder, **inv_freq)
    load_model(folder)


def test_a_head_of_its_own_is_used_even_where_the_config_ties_it(folder):
    edit_json(folder / "config.json", tie_word_embeddings=True)
    assert not load_model(folder).config.tied_head
    change_tensors(folder, lm_head__weight=None)
    assert load_model(folder).config.tied_head


KEYS = {
    "unknown_number": ({"foo_scale": 0.5}, "does not know 'foo_scale' (0.5)"),
    "unknown_flag": ({"use_alibi": True}, "'use_alibi'"),
    "quantised": ({"quantization_config": {"quant_method": "awq"}}, "no tensor is quantised"),
    "quanto": ({"quantization_config": {"quant_method": "quanto"}}, "quant_method is 'quanto'"),
    "experts": ({"num_local_experts": 8}, "'num_local_experts'"),
    "activation": ({"hidden_act": "relu"}, "'hidden_act' is 'relu'"),
    "type": ({"model_type": "zzz"}, "model_type is 'zzz'"),
    "no_type": ({"model_type": ...}, "no 'model_type'"),
    "no_width": ({"hidden_size": ...}, "no 'hidden_size'"),
    "width_text": ({"hidden_size": "64"}, "'hidden_size' must be a whole number"),
    "layers_many": ({"num_hidden_layers": 4_000_000_000}, "only 21 tensors"),
    "layers_fewer": ({"num_hidden_layers": 1}, "model.layers.1."),
    "rope_foo": ({"rope_parameters": {"rope_type": "foo"}}, "rope_type is 'foo'"),
    "rope_dynamic": (
        {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}},
        "rope_type is 'dynamic'",
    ),
    "rope_key": ({"rope_parameters": {"rope_type": "default", "mrope_section": [1]}}, "mrope"),
    "rope_zero": ({"rope_parameters": {"rope_type": "yarn", "factor": 0.0}}, "not possible"),
    "rope_wide": (
        {
            "head_dim": 1 << 40,
            "rope_parameters": {"rope_type": "yarn", "factor": 2.0},
        },
        "more than 65536",
    ),
    "rope_twice": (
        {"rope_parameters": ..., "rope_scaling": {"type": "linear", "rope_type": "yarn"}},
        "gives 'rope_type' as 'yarn' and as 'linear'",
    ),
    "end": ({"eos_token_id": 99_999}, "'eos_token_id' is 99999"),
}


@pytest.mark.parametrize("case", KEYS)
def test_a_key_that_does_not_fit_is_named(case, folder):
    changes, reason = KEYS[case]
    edit_json(folder / "config.json", **changes)
    with pytest.raises(StokerError) as caught:
        load_model(folder)
    message = str(caught.value)
    assert reason in message and "\n" not in message and len(message) < 400


STRANGE = (
    *(None, True, -1, 0, 1 << 70, float("inf"), float("nan"), "x"),
    *([], [[]], {}, {"a": {}}, ["x"], [1.5] * 4),
)


@pytest.mark.parametrize("name", CASES)
def test_strange_values_are_refused_in_one_sentence_or_do_no_harm(name):
    import transformers

    case = CASES[name]
    made = getattr(transformers, f"{case.config_kind or case.kind}Config")(**SIZES | case.config)
    values = made.to_dict()
    family = family_of_type(values["model_type"])
    tensors = [f"tensor {number}" for number in range(64)]
    model_config(family, ConfigJson(values), tensors)
    rope = values["rope_parameters"]
    changed = [{**values, key: strange} for key in values for strange in STRANGE]
    changed += [
        {**values, "rope_parameters": {**rope, key: strange}}
        for key in {*rope, "factor", "beta_fast", "short_factor"}
        for strange in STRANGE
    ]
    for config in changed:
        with contextlib.suppress(StokerError):
            abstract_params(model_config(family, ConfigJson(config), tensors))


def test_keys_that_turn_nothing_on_are_let_be(folder):
    extra = {"foo": None, "bar": False, "_note": 3, "unsloth_version": "1", "temperature": 0.6}
    edit_json(folder / "config.json", **extra)
    load_model(folder)


SPELLINGS = {
    "type": {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_theta": 500.0},
    "rope_type": {"rope_scaling": {"rope_type": "linear", "factor": 2.0}, "rope_theta": 500.0},
    "both": {
        "rope_scaling": {"rope_type": "linear", "type": "linear", "factor": 2.0},
        "rope_theta": 500.0,
    },
    "parameters": {
        "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 500.0},
    },
}


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_rope_scaling_in_all_its_spellings(spelling):
    json = ConfigJson(SPELLINGS[spelling])
    rope = rope_of(json, rope_settings(json), {"head_dim": 8, "max_positions": 64})
    assert (rope.theta, rope.scale, rope.factors) == (500.0, 2.0, ())


def test_llama3_frequencies_are_those_that_were_published():
    """CFG-02."""
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    json = ConfigJson({"rope_theta": 500000.0, "rope_scaling": scaling})
    rope = rope_of(json, rope_settings(json), {"head_dim": 128, "max_positions": 131072})
    ratio = [1 / factor for factor in rope.factors]
    known = {28: 1.0, 29: 0.828168, 31: 0.493507, 34: 0.190211, 35: 0.125, 63: 0.125}
    for pair, value in known.items():
        assert ratio[pair] == pytest.approx(value, abs=1e-6)


def test_replies_end_at_the_end_tokens_of_all_files(folder):
    """CFG-11."""
    edit_json(folder / "config.json", eos_token_id=[5, 6])
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9]}))
    tokenizer = load_model(folder).tokenizer
    assert tokenizer.stop_ids == {1, 5, 6, 7, 9} and tokenizer.eos_id == 1


def test_a_template_file_goes_before_the_one_in_the_settings(folder):
    settings = folder / "tokenizer_config.json"
    assert load_model(folder).tokenizer.chat_template is None
    named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    edit_json(settings, chat_template=named)
    assert load_model(folder).tokenizer.chat_template == "d"
    edit_json(settings, chat_template="one")
    assert load_model(folder).tokenizer.chat_template == "one"
    (folder / "chat_template.jinja").write_text("file")
    assert load_model(folder).tokenizer.chat_template == "file"


def test_more_tokens_than_rows_are_refused(folder):
    edit_json(folder / "config.json", vocab_size=256)
    cut = np.ones((256, 64), np.float32)
    change_tensors(folder, model__embed_tokens__weight=cut, lm_head__weight=cut)
    with pytest.raises(StokerError, match="its embedding only 256 rows"):
        load_model(folder)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
@pytest.mark.parametrize("text", ["", "{", "[]", "\xff"])
def test_a_damaged_json_file_is_named(name, text, folder):
    (folder / name).write_bytes(text.encode("latin-1"))
    with pytest.raises(StokerError, match=name.replace(".", r"\.")):
        load_model(folder)


def test_a_folder_without_a_tokenizer_says_so(folder):
    (folder / "tokenizer.json").unlink()
    with pytest.raises(StokerError, match=r"no tokenizer\.json or tokenizer\.model"):
        load_model(folder)


def test_the_command_replies_as_transformers_does(folder, capsys):
    import torch
    import transformers

    flags = ("--prompt=the other", "--max_tokens=6", "--json", "--nocache_programs")
    status = generate.COMMAND.main([f"--model={folder}", "--activations=float32", *flags])
    result = json.loads(capsys.readouterr().out)
    reference = transformers.AutoModelForCausalLM.from_pretrained(folder)
    ids = transformers.AutoTokenizer.from_pretrained(folder)("the other").input_ids
    reply = reference.generate(torch.tensor([ids]), max_new_tokens=6, do_sample=False)
    assert status == 0 and result["prompt_ids"] == ids
    assert result["ids"] == reply[0, len(ids) :].tolist()


def test_loading_takes_little_more_memory_than_the_files(tmp_path):
    sizes = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 10}
    folder = write(make(Case("Llama", sizes)), tmp_path, max_shard_size="80MB")
    grown, file_bytes = load_growth(folder, "cpu")
    assert file_bytes > 120e6
    # The parameters alone are nearly the files' size: less would mean a broken measurement.
    assert 0.9 * file_bytes < grown < 1.7 * file_bytes, (
        f"{grown / 1e6:.0f} MB for files of {file_bytes / 1e6:.0f} MB"
    )
