"""One engine in several processes: process 0 plans and tells each call, the others make it too."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np

from ..models.config import ModelConfig
from ..models.errors import one_line
from ..models.loading import Model
from ..models.parameters import Params
from ..sharding import Team
from ..sharding.frames import Frame
from .device import Device
from .steps import State

#: What process 0 tells the others.
_OPEN, _CLOSE, _RESET, _ADMIT, _PREPARE, _RUN, _SEAL, _END = range(8)
#: `value` of a frame for a step: its number and, above these bits, how often it repeats.
_STEP_BITS = 4
#: Bytes of an array whose content is compared between processes.
_SMALL = 1 << 16


def new_device(params: Params, config: ModelConfig, *, team: Team | None, **made: Any) -> Device:
    """The device of an engine; with a `team`, one that all its processes have."""
    if team is None:
        return Device(params, config, **made)
    return LeadingDevice(team, params, config, **made)


class LeadingDevice(Device):
    """The device on process 0, which tells the others each call before it makes it itself.

    A call that fails here, but maybe not there, ends all processes: the others may be inside its
    collectives, which no later call can match.
    """

    def __init__(self, team: Team, params: Params, config: ModelConfig, **made: Any) -> None:
        self._team = team
        self._number = team.new_number()
        # The page table's changes go with the next call.
        self._pages_told: list[int] = []
        sizes = {name: made[name] for name in ("slots", "context", "n_pages")}
        sizes["end_ids"] = list(made["end_ids"])
        text = np.frombuffer(json.dumps(sizes).encode(), np.uint8)
        with self._told(_OPEN, arrays=(text,)):
            super().__init__(params, config, **made)
        # Told with the next call: this may happen anywhere, even within one.
        weakref.finalize(self, team.finished.append, self._number)

    def reset(self) -> None:
        """As `Device.reset`."""
        with self._told(_RESET):
            self._pages_told.clear()
            super().reset()

    def list_pages(self, place: int, first: int, pages: Sequence[int]) -> None:
        """As `Device.list_pages`."""
        self._pages_told += (place, first, len(pages), *pages)
        super().list_pages(place, first, pages)

    def admit(self, place: int, row: State) -> None:
        """As `Device.admit`."""
        with self._told(_ADMIT, place, _packed(row)):
            super().admit(place, row)

    def prepare(self, step: int, arrays: Sequence[Any], repeat: int = 0) -> None:
        """As `Device.prepare`."""
        with self._told(_PREPARE, step | repeat << _STEP_BITS, arrays):
            super().prepare(step, arrays, repeat)

    def run(self, step: int, arrays: Sequence[Any], repeat: int = 0) -> Any:
        """As `Device.run`."""
        pages = np.array(self._pages_told, np.int32)
        self._pages_told.clear()
        with self._told(_RUN, step | repeat << _STEP_BITS, (pages, *arrays)):
            return super().run(step, arrays, repeat)

    def seal(self) -> None:
        """As `Device.seal`."""
        with self._told(_SEAL):
            super().seal()

    def fetch(self, found: Any) -> Any:
        """As `Device.fetch`."""
        with self._ending_all():
            return super().fetch(found)

    @contextmanager
    def _told(self, code: int, value: int = 0, arrays: Sequence[Any] = ()) -> Iterator[None]:
        """Tells the others a call, before it is made here."""
        with self._team.whole(), self._ending_all():
            while self._team.finished:
                self._team.send(Frame(_CLOSE, self._team.finished.popleft()))
            self._team.send(Frame(code, self._number, value, tuple(arrays)))
            yield

    @contextmanager
    def _ending_all(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self._team.fail_unless_lost(f"a step failed: {one_line(error)}")
            raise


def follow(model: Model, team: Team) -> None:
    """Makes the calls that process 0 makes, until it sends this one off."""
    devices: dict[int, Device] = {}
    while (frame := team.receive()).code != _END:
        try:
            _make(frame, devices, model)
        except Exception as error:
            team.fail_unless_lost(f"a step failed: {one_line(error)}")
            raise


def dismiss(team: Team) -> None:
    """On process 0: ends `follow` in all others."""
    team.send(Frame(_END))


def facts_of(model: Model) -> dict[str, str]:
    """What processes must have in common to run one model, by name.

    Of the weights these are shapes and whatever small arrays (norms, biases) all devices hold.
    """
    weights = hashlib.sha256()
    for leaf in jax.tree.leaves(model.params):
        weights.update(f"{leaf.shape}{leaf.dtype}".encode())
        if leaf.sharding.is_fully_replicated and leaf.nbytes <= _SMALL:
            weights.update(np.asarray(leaf.addressable_data(0)).tobytes())
    config = model.config
    return {
        "mesh": str(config.split),
        "numerics": f"{config.dtype}/{config.kv_dtype}/{'/'.join(_kernels(config))}",
        "architecture": hashlib.sha256(repr(config).encode()).hexdigest()[:12],
        "weights": weights.hexdigest()[:12],
    }


def _make(frame: Frame, devices: dict[int, Device], model: Model) -> None:
    """Makes one call of `LeadingDevice`."""
    number, value, arrays = frame.target, frame.value, frame.arrays
    if frame.code == _OPEN:
        sizes = json.loads(arrays[0].tobytes())
        devices[number] = Device(model.params, model.config, mesh=model.mesh, **sizes)
        return
    if frame.code == _CLOSE:
        del devices[number]
        return
    device = devices[number]
    step, repeat = value & (1 << _STEP_BITS) - 1, value >> _STEP_BITS
    if frame.code == _RESET:
        device.reset()
    elif frame.code == _ADMIT:
        device.admit(value, _unpacked(arrays, device))
    elif frame.code == _PREPARE:
        device.prepare(step, arrays, repeat)
    elif frame.code == _SEAL:
        device.seal()
    else:
        pages, *rest = arrays
        at = 0
        while at < len(pages):
            place, first, count = map(int, pages[at : at + 3])
            device.list_pages(place, first, pages[at + 3 : at + 3 + count])
            at += 3 + count
        device.run(step, rest, repeat)


def _packed(row: State) -> tuple[Any, ...]:
    """The arrays of a row, without the zeros after what is known of its history."""
    known: Any = np.trim_zeros(np.asarray(row.history), "b")
    short = dataclasses.replace(row, history=known)
    return tuple(jax.tree.leaves(short))


def _unpacked(arrays: Sequence[Any], device: Device) -> State:
    row = jax.tree.unflatten(jax.tree.structure(device.state), arrays)
    history: Any = np.zeros(device.state.history.shape[1], np.int32)
    history[: len(row.history)] = row.history
    return dataclasses.replace(row, history=history)


def _kernels(config: ModelConfig) -> tuple[str, str]:
    return config.kernels.platform, config.kernels.activations
