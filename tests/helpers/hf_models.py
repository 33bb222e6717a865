"""Tiny random models of each family, written by Hugging Face transformers itself."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from typing import Any

import numpy as np
import tokenizers

#: What all cases share unless they say otherwise: "T-LLAMA" with a small vocabulary.
SIZES = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}


@dataclasses.dataclass(frozen=True)
class Case:
    """One model: its class in transformers without the ends, and what its config has of its own."""

    kind: str
    config: dict[str, Any] = dataclasses.field(default_factory=dict)
    config_kind: str = ""

    def replace(self, **changes: Any) -> Case:
        """The same with changes to its config."""
        return dataclasses.replace(self, config=self.config | changes)


def make(case: Case, seed: int = 0) -> Any:
    """The model in float32, with random weights that make every part of it matter."""
    import torch
    import transformers

    config_class = getattr(transformers, f"{case.config_kind or case.kind}Config")
    config = config_class(**{**SIZES, **case.config}, attn_implementation="eager")
    torch.manual_seed(seed)
    model = getattr(transformers, f"{case.kind}ForCausalLM")(config).eval().float()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim > 1:
                weight.normal_(0, 2 * weight.shape[-1] ** -0.5)
            else:
                middle = weight.mean() if name.endswith("norm.weight") else 0.0
                weight.copy_(middle + 0.3 * torch.randn_like(weight))
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(0, 0.2)
    return model


def write(model: Any, folder: pathlib.Path, **options: Any) -> pathlib.Path:
    """`save_pretrained`, and a byte-level tokenizer beside it."""
    model.save_pretrained(folder, **options)
    write_tokenizer(folder, model.config.vocab_size)
    return folder


def write_tokenizer(folder: pathlib.Path, size: int) -> None:
    """A byte-level BPE tokenizer of `size` tokens at most, with `<|begin|>` and `<|end|>`."""
    engine = tokenizers.Tokenizer(tokenizers.models.BPE())
    engine.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    engine.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=["<|begin|>", "<|end|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    engine.train_from_iterator(["the theme of the other anthem"], trainer)
    engine.post_processor = tokenizers.processors.TemplateProcessing(
        single="<|begin|> $A", special_tokens=[("<|begin|>", 0)]
    )
    engine.save(str(folder / "tokenizer.json"))
    settings = {"bos_token": "<|begin|>", "eos_token": "<|end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def edit_json(path: pathlib.Path, **changes: Any) -> None:
    """Changes keys of a JSON file; those of value `...` are removed."""
    values = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in values.items() if value is not ...}))


def reference_logits(model: Any, ids: list[int]) -> np.ndarray:
    """Logits float32 `[len(ids), V]`."""
    import torch

    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0].float().numpy()
