"""The compile contract from shapes alone: all steps of an engine, whatever devices it is for.

Nothing is allocated: parameters, cache and state are `jax.ShapeDtypeStruct`s. Programs are those
that `Runner.warmup` would compile for the same options.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from ...models.config import ModelConfig
from ...models.pages import whole_page_tokens
from ...models.parameters import Params
from ...models.placing.placement import shape_params
from .. import steps
from ..accounting import StepCost, step_cost
from ..cache import Cache, new_cache
from ..on_mesh import cache_specs, slot_spec
from ..pages import pages_for
from ..programs import lower_admit, lower_step, own_part
from ..sampling_params import MAX_TOP, SamplingParams
from ..shapes import Shapes
from ..steps import DecodeBatch, PrefillBatch, State


@dataclasses.dataclass(frozen=True)
class StepShape:
    """One program of the contract.

    Attributes:
      step: name of a function of `engine/steps.py`.
      rows: flat rows (T) of each part of the data axis.
      sequences: sequences (B) likewise.
      repeat: steps that the device takes at once.
    """

    step: str
    rows: int
    sequences: int
    repeat: int = 1

    def __str__(self) -> str:
        if self.step == "admit":
            return "admit"
        if self.step == "score":
            return f"score:{self.rows}"
        if self.step == "decode":
            return f"decode:{self.rows}"
        by = self.repeat if self.step == "decode_steps" else self.sequences
        return f"{self.step}:{self.rows}x{by}"


def contract(shapes: Shapes, repeat: int = 1) -> list[StepShape]:
    """Every program that an engine with these shapes compiles, in the order of its warm-up."""
    found = [StepShape("admit", 1, 1)]
    for size in shapes.decode:
        found.append(StepShape("decode", size, size))
        if repeat > 1:
            found.append(StepShape("decode_steps", size, size, repeat))
    found += [StepShape("prefill", *shape) for shape in shapes.prefill()]
    return [*found, StepShape("score", shapes.score, 1)]


@dataclasses.dataclass(frozen=True)
class Setup:
    """An engine without its arrays.

    Attributes:
      config: of the model, with its `split`, kernels and types.
      weights: format of the matrices, one of `random_weights.WEIGHTS`.
      devices: those of the mesh, or the first of which serves alone.
      mesh: what the model is split over; None for one device.
      slots: of each part of the data axis.
      context: most tokens of a sequence.
      pages: usable pages, likewise.
    """

    config: ModelConfig
    weights: str
    devices: Sequence[Any]
    mesh: Mesh | None
    slots: int
    context: int
    pages: int

    @property
    def parts(self) -> int:
        """Parts of the data axis."""
        return self.config.split.degree("slots")

    @property
    def page_tokens(self) -> int:
        """Tokens of a page, on all devices that share it."""
        return whole_page_tokens(self.config)

    def _on(self, spec: PartitionSpec) -> Any:
        if self.mesh is None:
            return SingleDeviceSharding(self.devices[0])
        return NamedSharding(self.mesh, spec)

    def _shapes(self, tree: Any, spec: PartitionSpec, parts: int = 1) -> Any:
        """The shapes of arrays, of so many parts one after another, placed as `spec` says."""

        def placed(leaf: Any) -> jax.ShapeDtypeStruct:
            shape = (leaf.shape[0] * parts, *leaf.shape[1:]) if leaf.shape else ()
            return jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=self._on(spec))

        return jax.tree.map(placed, tree)

    def params(self) -> Params:
        """The parameters."""
        return shape_params(self.config, self.mesh, self.weights, self.devices[0])

    def cache(self) -> Cache:
        """The cache of every part."""
        shapes = jax.eval_shape(lambda: new_cache(self.config, self.pages))
        return jax.tree.map(
            lambda leaf, spec: self._shapes(leaf, spec), shapes, cache_specs(self.config)
        )

    def state(self) -> State:
        """The state of every part's slots."""
        idle = [SamplingParams()] * self.slots
        one = jax.eval_shape(lambda: steps.new_state(idle, self.config.vocab_size, self.context))
        return self._shapes(one, slot_spec(self.config), self.parts)

    def lower(self, shape: StepShape) -> jax.stages.Lowered:
        """One program of the contract, to be compiled."""
        if self.config.kernels.platform != "tpu":
            return self._lower(shape)
        # Pallas asks the mesh which kind of TPU it writes for; otherwise JAX's first device.
        one = Mesh(np.array(self.devices[:1]), ("data",))
        with jax.set_mesh(one if self.mesh is None else self.mesh):
            return self._lower(shape)

    def _lower(self, shape: StepShape) -> jax.stages.Lowered:
        config = self.config
        state = self.state()
        if shape.step == "admit":
            row = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), state)
            row = self._shapes(row, PartitionSpec())
            slot = self._shapes(jax.ShapeDtypeStruct((), jnp.int32), PartitionSpec())
            return lower_admit(config, state, slot, row, mesh=self.mesh)
        table: Any = np.zeros(
            (shape.sequences, pages_for(self.context, self.page_tokens)), np.int32
        )
        numbers: Any = np.zeros(shape.sequences, np.int32)
        static = {"steps": shape.repeat} if shape.step == "decode_steps" else {}
        batch: Any = DecodeBatch(table, numbers, numbers)
        rest: tuple[Any, ...] = ()
        if shape.step in ("prefill", "score"):
            rows: Any = np.zeros(shape.rows, np.int32)
            starts: Any = np.zeros(shape.sequences + 1, np.int32)
            samples: Any = np.zeros(shape.sequences, bool)
            batch = PrefillBatch(rows, starts, numbers, table, numbers, samples)
            rest = (rows,) if shape.step == "score" else ()
        arrays = self._shapes((batch, *rest), slot_spec(config), self.parts)
        arguments = (self.params(), self.cache(), state, *arrays)
        step = getattr(steps, shape.step)
        return lower_step(step, config, *arguments, mesh=self.mesh, top=MAX_TOP, **static)

    def cost(self, shape: StepShape) -> StepCost:
        """What one device must move and compute in one call of this program, by Stoker's count.

        Every sequence is taken to be as long as `context`: compilers know shapes, not lengths.
        """
        config, heads = self.config, self.config.heads
        params = jax.tree.map(own_part, self.params())
        shared = config.split.degree("context")
        own = dataclasses.replace(
            config,
            n_heads=heads.query.width,
            n_kv_heads=heads.kv.width,
            vocab_size=params["embedding"].shape[0],
        )
        rows = shape.rows / shared
        cost = step_cost(own, params, [self.context] * shape.sequences, rows)
        cost = dataclasses.replace(
            cost,
            kv_read=cost.kv_read / shared,
            logits=cost.logits * (shape.rows if shape.step == "score" else 1),
        )
        return StepCost(*(shape.repeat * figure for figure in dataclasses.astuple(cost)))
