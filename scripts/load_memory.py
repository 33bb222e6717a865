"""Peak memory and time of loading, quantising and converting a checkpoint of some gigabytes.

    python scripts/load_memory.py FOLDER [--layers=16] [--only=WORDS]

Writes a random bfloat16 model in the layout of Hugging Face into FOLDER (3.0 GB of 16 layers, in
shards), runs each case (or those with these words in their names) in a process of its own, and
prints what its peak of memory grew by, beside what it read and what came of it, its own part where
several processes share the model. The folder and everything in it may be deleted afterwards.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import shutil
import socket
import subprocess
import sys

import ml_dtypes
import numpy as np
import tokenizers
from safetensors.numpy import save_file

V, D, F, N, K, H = 128_256, 2048, 8192, 32, 8, 64
CASES = {
    "load, cpu kernels": "load_model(source, kernels='cpu')",
    "load, xla": "load_model(source, kernels='xla')",
    "load --quantize=int8, cpu": "load_model(source, kernels='cpu', quantize='int8')",
    "load --quantize=int4, cpu": "load_model(source, kernels='cpu', quantize='int4')",
    "load --quantize=int4, xla": "load_model(source, kernels='xla', quantize='int4')",
    "load, the last of 4 processes": "load_model(source, kernels='xla', mesh=mesh)",
    "4 processes, --quantize=int4": "load_model(source, kernels='xla', mesh=mesh, quantize='int4')",
    "convert to safetensors": "convert_model(source, out)",
    "convert to safetensors, int4": "convert_model(source, out, quantize='int4')",
    "load that, cpu kernels": "load_model(out, kernels='cpu')",
    "convert to orbax": "convert_model(source, out, to='orbax')",
    "convert to orbax, int4": "convert_model(source, out, to='orbax', quantize='int4')",
    "load that, cpu": "load_model(out, kernels='cpu')",
}
#: Processes of one device each that share a model.
PROCESSES = 4
MEASURE = """
import pathlib, re, sys, time, jax
from stoker.models.checkpoints.converting import convert_model
from stoker.models.checkpoints.safetensors import SafetensorsCheckpoint
from stoker.models.loading import load_model
from stoker.models.ops import cpu
from stoker.sharding import join, make_mesh
def peak():
    status = pathlib.Path("/proc/self/status").read_text()
    return int(re.search(r"VmHWM:\\s+(\\d+)", status)[1]) * 1024
def counted(self, *given):
    value = load(self, *given)
    read.append(value.nbytes)
    return value
def held(leaf):
    return sum(shard.data.nbytes for shard in leaf.addressable_shards)
read, load = [], SafetensorsCheckpoint.load
SafetensorsCheckpoint.load = counted
code, source, out, address, count, index = sys.argv[1:]
source, out, count = pathlib.Path(source), pathlib.Path(out), int(count)
team = join(address, count, int(index)) if count > 1 else None
mesh = make_mesh({"tensor": count}) if team else None
jax.devices(), cpu.load()
before, start = peak(), time.perf_counter()
result = eval(code)
seconds, grown = time.perf_counter() - start, peak() - before
params = getattr(result, "params", None)
made = sum(map(held, jax.tree.leaves(params))) if params else result.written_bytes
print("found", grown, sum(read), made, seconds, flush=True)
if team:
    team.agree({})
    team.leave()
"""


def write_model(folder: pathlib.Path, L: int) -> int:
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


def measure(code: str, source: pathlib.Path, out: pathlib.Path) -> subprocess.CompletedProcess:
    """Runs a case, in several processes where it has a mesh; what the last one found."""
    count = PROCESSES if "mesh" in code else 1
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    own = [sys.executable, "-c", MEASURE, code, str(source), str(out), address, str(count)]
    one_device = {"XLA_FLAGS": "--xla_force_host_platform_device_count=1"}
    environment = {**os.environ, **one_device}
    others = [
        subprocess.Popen(
            [*own, str(index)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=environment,
        )
        for index in range(count - 1)
    ]
    run = subprocess.run(
        [*own, str(count - 1)], capture_output=True, text=True, check=False, env=environment
    )
    for other in others:
        other.wait()
    return run


def main() -> None:
    """Writes, measures, prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--only", default="")
    given = parser.parse_args()
    source, out = given.folder / "source", given.folder / "out"
    source.mkdir(parents=True, exist_ok=True)
    size = write_model(source, given.layers)
    columns = ("grew by", "read", "result", "seconds")
    title = " ".join(f"{column:>9}" for column in columns)
    print(f"{'case':30} {title}   (GB; the model has {size / 1e9:.2f})")
    for name, code in CASES.items():
        if given.only not in name:
            continue
        if code.startswith("convert"):
            shutil.rmtree(out, ignore_errors=True)
        run = measure(code, source, out)
        found = [line for line in run.stdout.splitlines() if line.startswith("found")]
        if run.returncode or not found:
            print(f"{name:30} failed: {run.stderr.strip().splitlines()[-1]}", flush=True)
            continue
        *gigabytes, seconds = map(float, found[0].split()[1:])
        shown = " ".join(f"{value / 1e9:9.2f}" for value in gigabytes)
        print(f"{name:30} {shown} {seconds:9.1f}", flush=True)


if __name__ == "__main__":
    main()
