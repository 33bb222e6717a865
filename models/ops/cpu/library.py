"""Finds the compiled kernels and registers them with XLA; says why where there are none."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import pathlib

import jax

#: Instruction sets in the order of `Isa` in kernels.h; "best" is what the processor has.
ISAS = ("best", "portable", "avx2", "avx512vnni")
_TARGETS = (
    "stoker_matmul",
    "stoker_grouped_matmul",
    "stoker_attention",
    "stoker_latent_attention",
    "stoker_sample",
    "stoker_logsumexp",
    "stoker_largest",
    "stoker_route",
    "stoker_deal",
    "stoker_combine",
    "stoker_rms_norm",
)


@dataclasses.dataclass(frozen=True)
class Library:
    """The kernels, registered as foreign-function targets of XLA's CPU platform.

    Attributes:
      path: the shared library.
      isas: instruction sets that this processor can run, the best last.
    """

    path: pathlib.Path
    isas: tuple[str, ...]

    @property
    def best(self) -> str:
        """What the kernels use unless told otherwise."""
        return self.isas[-1]


@functools.cache
def _load() -> Library | str:
    """`open_library` of this folder; once in a process."""
    return open_library(pathlib.Path(__file__).parent)


def open_library(folder: pathlib.Path) -> Library | str:
    """Registers the library in `folder` with XLA; or says why it cannot be used."""
    paths = sorted(folder.glob("stoker_cpu*.so")) + sorted(folder.glob("stoker_cpu*.pyd"))
    if not paths:
        return (
            "the CPU kernels were not compiled when Stoker was installed; install a C++17 compiler "
            "(g++ or clang++) and reinstall Stoker"
        )
    try:
        # Before the backend is up, a registration that XLA refuses would break the backend itself.
        jax.devices("cpu")
        library = ctypes.CDLL(str(paths[-1]))
        for target in _TARGETS:
            capsule = jax.ffi.pycapsule(getattr(library, target))
            jax.ffi.register_ffi_target(target, capsule, platform="cpu")
        best = int(library.stoker_best_isa())
    except Exception as error:
        # A library for another processor, Python or XLA: the reference serves instead.
        reason = " ".join(str(error).split())
        return (
            f"the CPU kernels in {paths[-1].name} cannot be used ({reason}); compile them against "
            "this JAX: pip install --force-reinstall --no-deps --no-build-isolation stoker"
        )
    return Library(paths[-1], ISAS[1 : best + 1])


def load() -> Library | None:
    """The compiled kernels, registered with XLA, or None where they cannot be used."""
    library = _load()
    return library if isinstance(library, Library) else None


def why_unavailable() -> str | None:
    """One sentence on why `load` gives None and what to do; None where it gives a library."""
    reason = _load()
    if isinstance(reason, Library):
        return None
    return f"products, attention and sampling run on the slow reference, since {reason}"
