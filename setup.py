"""Compiles the CPU kernels. Optional: without them Stoker runs slower (models/ops/README.md)."""

from glob import glob

import jax
from setuptools import Extension, setup
from setuptools.command.build_py import build_py

FOLDER = "models/ops/cpu"


class BuildPy(build_py):
    """Leaves this script out: the repository root is the package, so it looks like a module."""

    def find_package_modules(self, package, package_dir):
        """The modules of a package as (package, module, file)."""
        modules = super().find_package_modules(package, package_dir)
        return [found for found in modules if found[:2] != ("stoker", "setup")]


setup(
    cmdclass={"build_py": BuildPy},
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
    ],
)
