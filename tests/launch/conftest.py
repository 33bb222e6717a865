"""Tiny models in files, for the commands."""

from __future__ import annotations

import pytest
from gguf_files import Tiny, write_gguf

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    return str(write_gguf(path, Tiny(), metadata={"tokenizer.chat_template": TEMPLATE}))


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model without chat template and without begin token."""
    path = tmp_path_factory.mktemp("model") / "bare.gguf"
    return str(write_gguf(path, Tiny(), metadata={"tokenizer.ggml.add_bos_token": False}))
