"""Accelerators to compile for that need not be there: their compilers, and what they hold."""

from __future__ import annotations

import dataclasses
import importlib.resources
import importlib.util
import math
import os
import re
import tomllib
from typing import Any

import jax

from ... import configs
from ...models.errors import StokerError

#: The module of each platform's compiler; the extra `<platform>-compile` holds it.
_COMPILERS = {"tpu": "libtpu", "gpu": "jax_plugins.xla_cuda13"}
#: What the compilers read from the environment of a process without accelerators. `libtpu` is not
#: to ask a cloud or other hosts which TPU it has, and several processes may load it.
COMPILE_ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}
_TOPOLOGY = re.compile(r"\d+(x\d+)*")


@dataclasses.dataclass(frozen=True)
class Target:
    """Devices of one kind, which need not be there.

    Attributes:
      name: as it was asked for, with its topology: `v5e:2x4`.
      platform: "tpu" or "gpu", as JAX and `Kernels` call it.
      devices: descriptions, which stand for devices in meshes and shardings.
      memory_bytes: of each device.
      bandwidth: bytes per second that each can read.
      operations: dense bfloat16 operations per second of each.
    """

    name: str
    platform: str
    devices: tuple[Any, ...] = dataclasses.field(repr=False)
    memory_bytes: int
    bandwidth: float
    operations: float


def target_kinds() -> dict[str, dict[str, Any]]:
    """What `configs/targets.toml` says of each kind of device."""
    text = importlib.resources.files(configs).joinpath("targets.toml").read_text("utf-8")
    return tomllib.loads(text)


def prepare_process() -> None:
    """Keeps JAX and `libtpu` from looking for accelerators of this machine.

    To be called before JAX is asked for devices; it sets `COMPILE_ENVIRONMENT`, where the
    environment does not say otherwise, for this process alone.
    """
    jax.config.update("jax_platforms", "cpu")
    for name, value in COMPILE_ENVIRONMENT.items():
        os.environ.setdefault(name, value)


def find_target(name: str) -> Target:
    """The devices that a name stands for.

    Args:
      name: a kind of `configs/targets.toml` and, after a colon, a topology: chips along each axis
        of a TPU slice (`v5e:2x4`), or the number of GPUs of a host (`h200:8`), or hosts and GPUs
        of each (`h200:2x8`). Without one, the smallest slice, or one GPU.

    Raises:
      StokerError: for an unknown kind or topology, or where the compiler is not installed.
    """
    kinds = target_kinds()
    kind, _, topology = name.partition(":")
    if kind not in kinds:
        raise StokerError(f"target '{name}' is not known; use {', '.join(kinds)}, as in v5e:2x4")
    facts = kinds[kind]
    platform, topology = facts["platform"], topology or facts["topology"]
    if not _TOPOLOGY.fullmatch(topology):
        raise StokerError(
            f"target '{name}' has topology '{topology}'; give numbers, as in v5e:2x4 or h200:8"
        )
    if not _installed(_COMPILERS[platform]):
        raise StokerError(
            f"compiling for {kind} needs the {platform.upper()} compiler; "
            f"pip install 'stoker[{platform}-compile]'"
        )
    return Target(
        name=f"{kind}:{topology}",
        platform=platform,
        devices=_devices(kind, topology, facts),
        memory_bytes=facts["memory_bytes"],
        bandwidth=facts["bandwidth"],
        operations=facts["operations"],
    )


def _installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def _devices(kind: str, topology: str, facts: dict[str, Any]) -> tuple[Any, ...]:
    from jax.experimental import topologies

    options: dict[str, Any] = {"platform": "tpu", "topology_name": f"{kind}:{topology}"}
    if facts["platform"] == "gpu":
        sizes = [int(size) for size in topology.split("x")]
        if len(sizes) > 2 or not math.prod(sizes):
            raise StokerError(
                f"target '{kind}:{topology}' is not hosts and GPUs of each; give h200:8 or h200:2x8"
            )
        hosts, devices = (1, *sizes)[-2:]
        options = {
            "platform": "cuda",
            "topology_name": "cuda",
            "topology": f"1x{hosts}x{devices}",
            "target_config": facts["config"],
        }
    try:
        return tuple(topologies.get_topology_desc(**options).devices)
    except Exception as error:  # of no type of its own
        reason = " ".join(str(error).split())[:200]
        raise StokerError(
            f"the compiler has no topology '{kind}:{topology}'; give another ({reason})"
        ) from None
