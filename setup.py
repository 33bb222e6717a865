"""Compiles the CPU kernels. Optional: without them Stoker runs slower (models/ops/README.md)."""

from glob import glob

import jax
from setuptools import Extension, setup

FOLDER = "models/ops/cpu"

setup(
    ext_modules=[
        Extension(
            "stoker.models.ops.cpu.stoker_cpu",
            sources=sorted(glob(f"{FOLDER}/*.cc")),
            depends=sorted(glob(f"{FOLDER}/*.h")),
            include_dirs=[jax.ffi.include_dir()],
            extra_compile_args=[
                "-std=c++17",
                "-O3",
                "-g0",
                # Without contraction an expression has the same bits wherever it is inlined.
                "-ffp-contract=off",
                # Intrinsics of GCC 12 start from undefined registers on purpose.
                "-Wno-uninitialized",
                "-Wno-maybe-uninitialized",
            ],
            language="c++",
            py_limited_api=True,
            optional=True,
        )
    ]
)
