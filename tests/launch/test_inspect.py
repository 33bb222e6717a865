"""`stoker inspect`: figures equal those of the loaded model; every format, no tensor read."""

from __future__ import annotations

import json
import pathlib

import jax
import pytest
from gguf_files import Tiny, write_gguf
from hf_models import edit_json, make, write
from running import CASES

from stoker.engine.cache import token_bytes
from stoker.launch import inspect
from stoker.models.checkpoints.converting import convert_model
from stoker.models.checkpoints.inspection import inspect_model
from stoker.models.loading import load_model
from stoker.models.parameters import abstract_params, count_bytes, count_elements


def command(capsys, *flags: str) -> tuple[int, str, str]:
    status = inspect.COMMAND.main(list(flags))
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def check(path: pathlib.Path) -> dict:
    """What is reported, compared with what is loaded."""
    report = inspect_model(path)
    model = load_model(path, kernels="xla", kv_dtype="bfloat16")
    assert report.total.parameters == count_elements(abstract_params(model.config))
    assert report.total.loaded_bytes == count_bytes(model.params)
    assert report.kv_token_bytes == token_bytes(model.config)
    assert report.file_bytes == model.file_bytes
    assert report.tokenizer["tokens"] == model.tokenizer.vocab_size
    assert set(report.tokenizer["end"]) == model.tokenizer.stop_ids
    return report.to_json()


@pytest.mark.parametrize("quantisation", ["F32", "BF16", "Q4_1", "Q5_0", "Q8_0"])
def test_gguf_files_and_what_is_converted_from_them(quantisation, tmp_path):
    path = write_gguf(tmp_path / "m.gguf", Tiny(biases=True), quantisation=quantisation)
    values = check(path)
    assert values["format"] == "GGUF" and values["types"][quantisation]["tensors"] >= 16
    assert values["groups"]["attention"]["parameters"] == 2 * 64 * (64 + 16 + 16 + 64)
    assert values["groups"]["norms and biases"]["parameters"] == 5 * 64 + 2 * (64 + 16 + 16)
    assert "there is no chat template" in values["unusual"]
    for to in ("safetensors", "orbax"):
        converted = check(convert_model(path, tmp_path / to, to=to).path)
        assert converted["format"].startswith(f"stoker ({to}), from ")
        assert converted["total"]["loaded_bytes"] == values["total"]["loaded_bytes"]


@pytest.mark.reference
def test_a_folder_with_experts_windows_and_spare_rows(tmp_path):
    folder = write(make(CASES["qwen3-moe"]), tmp_path / "moe")
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    values = check(folder)
    assert values["tokenizer"]["template_source"] == "chat_template.jinja"
    experts = values["groups"]["experts"]
    router = 2 * 5 * 64
    assert (experts["parameters"] - router) * 3 == (experts["active"] - router) * 5
    assert any("rows that no token has" in line for line in values["unusual"])
    folder = write(make(CASES["gemma2"]), tmp_path / "gemma")
    edit_json(folder / "config.json", max_position_embeddings=64)
    values = check(folder)
    assert values["kv_context_bytes"] == values["kv_token_bytes"] * (64 + 16) // 2
    text = "\n".join(values["unusual"])
    assert "1 of 2 layers see 16 tokens" in text and "soft-capped" in text


def test_tables_and_json(capsys, tmp_path):
    template = {"tokenizer.chat_template": "[x] {{ messages }}"}
    path = write_gguf(tmp_path / "m.gguf", Tiny(), quantisation="Q4_0", metadata=template)
    status, out, err = command(capsys, f"--model={path}")
    assert (status, err) == (0, "")
    for word in ("llama: 2 layers of 64", "Q4_0", "embedding", "tokenizer.chat_template"):
        assert word in out
    status, out, _ = command(capsys, f"--model={path}", "--json=-")
    assert status == 0 and json.loads(out) == inspect_model(path).to_json() | {
        "tokenizer": json.loads(json.dumps(inspect_model(path).tokenizer))
    }
    target = tmp_path / "report.json"
    assert command(capsys, f"--model={path}", f"--json={target}") == (0, "", "")
    assert json.loads(target.read_text())["config"]["family"] == "llama"
    status, _, err = command(capsys, f"--model={path}", f"--json={tmp_path / 'no' / 'x'}")
    assert status == 1 and "--json: cannot write" in err


def test_metadata_that_nothing_reads_is_listed(tmp_path):
    path = write_gguf(tmp_path / "plain.gguf", Tiny(biases=True))
    assert not any("nothing reads" in line for line in inspect_model(path).unusual)
    path = write_gguf(tmp_path / "m.gguf", Tiny(), metadata={"llama.novel.key": 3, "x.y": 1})
    assert "metadata that nothing reads: llama.novel.key" in inspect_model(path).unusual


def test_no_tensor_is_read(tmp_path, monkeypatch):
    path = write_gguf(tmp_path / "m.gguf", Tiny())
    for name in ("device_put", "jit"):
        monkeypatch.setattr(jax, name, lambda *_, **__: pytest.fail("an array was made"))
    monkeypatch.setattr(
        "stoker.models.checkpoints.gguf.GGUFCheckpoint.load", lambda *_: pytest.fail("was read")
    )
    assert inspect_model(path).total.parameters > 0
