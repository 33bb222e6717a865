"""Peak memory and time of loading, quantising and converting a checkpoint of some gigabytes.

    python scripts/load_memory.py FOLDER

Writes a random bfloat16 model in the layout of Hugging Face into FOLDER (3.0 GB, in shards), runs
each case in a process of its own, and prints what its peak of memory grew by, beside what it read
and what came of it. The folder and everything in it may be deleted afterwards.
"""

from __future__ import annotations

import json
import pathlib
import shutil
import subprocess
import sys

import ml_dtypes
import numpy as np
import tokenizers
from safetensors.numpy import save_file

V, D, F, L, N, K, H = 128_256, 2048, 8192, 16, 32, 8, 64
CASES = {
    "load, cpu kernels": "load_model(source, kernels='cpu')",
    "load, xla": "load_model(source, kernels='xla')",
    "load --quantize=int8, cpu": "load_model(source, kernels='cpu', quantize='int8')",
    "load --quantize=int4, cpu": "load_model(source, kernels='cpu', quantize='int4')",
    "load --quantize=int4, xla": "load_model(source, kernels='xla', quantize='int4')",
    "convert to safetensors": "convert_model(source, out)",
    "convert to safetensors, int4": "convert_model(source, out, quantize='int4')",
    "load that, cpu kernels": "load_model(out, kernels='cpu')",
    "convert to orbax": "convert_model(source, out, to='orbax')",
    "convert to orbax, int4": "convert_model(source, out, to='orbax', quantize='int4')",
    "load that, cpu": "load_model(out, kernels='cpu')",
}
MEASURE = """
import pathlib, re, sys, time, jax
from stoker.models.checkpoints.converting import convert_model
from stoker.models.loading import load_model
from stoker.models.ops import cpu
from stoker.models.parameters import count_bytes
def peak():
    status = pathlib.Path("/proc/self/status").read_text()
    return int(re.search(r"VmHWM:\\s+(\\d+)", status)[1]) * 1024
source, out = map(pathlib.Path, sys.argv[2:])
jax.devices(), cpu.load()
before, start = peak(), time.perf_counter()
result = eval(sys.argv[1])
seconds = time.perf_counter() - start
made = count_bytes(result.params) if hasattr(result, "params") else result.written_bytes
print(peak() - before, made, seconds)
"""


def write_model(folder: pathlib.Path) -> int:
    """Writes the model, a layer at a time; returns the bytes of its tensors."""
    rng = np.random.default_rng(0)
    placed: dict[str, str] = {}
    total = 0

    def save(number: int, shapes: dict[str, tuple[int, ...]]) -> int:
        tensors = {
            name: (rng.standard_normal(shape, np.float32) * 0.02).astype(ml_dtypes.bfloat16)
            for name, shape in shapes.items()
        }
        file = f"model-{number:05}-of-{L + 2:05}.safetensors"
        save_file(tensors, folder / file)
        placed.update(dict.fromkeys(tensors, file))
        return sum(tensor.nbytes for tensor in tensors.values())

    for layer in range(L):
        at = f"model.layers.{layer}."
        shapes: dict[str, tuple[int, ...]] = {
            f"{at}self_attn.q_proj.weight": (N * H, D),
            f"{at}self_attn.k_proj.weight": (K * H, D),
            f"{at}self_attn.v_proj.weight": (K * H, D),
            f"{at}self_attn.o_proj.weight": (D, N * H),
            f"{at}mlp.gate_proj.weight": (F, D),
            f"{at}mlp.up_proj.weight": (F, D),
            f"{at}mlp.down_proj.weight": (D, F),
            f"{at}input_layernorm.weight": (D,),
            f"{at}post_attention_layernorm.weight": (D,),
        }
        total += save(layer + 1, shapes)
    total += save(L + 1, {"model.embed_tokens.weight": (V, D)})
    total += save(L + 2, {"lm_head.weight": (V, D), "model.norm.weight": (D,)})
    index = {"metadata": {"total_size": total}, "weight_map": placed}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    config = {
        "model_type": "llama",
        "vocab_size": V,
        "hidden_size": D,
        "intermediate_size": F,
        "num_hidden_layers": L,
        "num_attention_heads": N,
        "num_key_value_heads": K,
        "head_dim": H,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
    }
    (folder / "config.json").write_text(json.dumps(config))
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    engine = tokenizers.Tokenizer(
        tokenizers.models.BPE({letter: i for i, letter in enumerate(sorted(alphabet))}, [])
    )
    engine.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    engine.decoder = tokenizers.decoders.ByteLevel()
    engine.save(str(folder / "tokenizer.json"))
    return total


def main() -> None:
    """Writes, measures, prints."""
    folder = pathlib.Path(sys.argv[1])
    source, out = folder / "source", folder / "out"
    source.mkdir(parents=True, exist_ok=True)
    size = write_model(source)
    print(f"{'case':30} {'grew by':>9} {'result':>9} {'seconds':>8}   (GB; read {size / 1e9:.2f})")
    for name, code in CASES.items():
        if code.startswith("convert"):
            shutil.rmtree(out, ignore_errors=True)
        run = subprocess.run(
            [sys.executable, "-c", MEASURE, code, str(source), str(out)],
            capture_output=True,
            text=True,
            check=False,
        )
        if run.returncode:
            print(f"{name:30} failed: {run.stderr.strip().splitlines()[-1]}", flush=True)
            continue
        grown, made, seconds = map(float, run.stdout.split())
        print(f"{name:30} {grown / 1e9:9.2f} {made / 1e9:9.2f} {seconds:8.1f}", flush=True)


if __name__ == "__main__":
    main()
