"""How much memory loading a model takes, in a process of its own."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

# As glibc starts. It raises this whenever such a block is freed, keeps freed blocks below it for
# each thread, and so another 20 MB in some runs and not in others.
MMAP_FROM_BYTES = 128 << 10
# On Linux ru_maxrss survives exec, so a child would start at its parent's peak.
MEASURE = """
import pathlib, re, resource, sys
import jax, ml_dtypes, numpy as np
from stoker.models.loading import load_model
from stoker.models.quantise import Quantisation, quantise
from stoker.models.ops import cpu
def peak():
    if sys.platform == "linux":
        status = pathlib.Path("/proc/self/status").read_text()
        return int(re.search(r"VmHWM:\\s+(\\d+)", status)[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
how = Quantisation.parse(sys.argv[3]) if sys.argv[3] else None
jax.devices(), cpu.load()
# What compiling takes is not the model's.
if how: quantise(np.ones((512, 1024), ml_dtypes.bfloat16), how)
before = peak()
model = load_model(sys.argv[1], kernels=sys.argv[2], quantize=how)
print(peak() - before, model.file_bytes)
"""


def load_growth(path: pathlib.Path, kernels: str, quantize: str = "") -> tuple[float, float]:
    """Bytes by which the peak of memory grew, and bytes of the checkpoint."""
    command = [sys.executable, "-c", MEASURE, str(path), kernels, quantize]
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(MMAP_FROM_BYTES)}
    result = subprocess.run(
        command, capture_output=True, text=True, timeout=120, check=True, env=environment
    )
    grown, file_bytes = map(float, result.stdout.split())
    return grown, file_bytes
