"""Which axes of a mesh each logical axis is split over, as data."""

from __future__ import annotations

import dataclasses
import math
import types
from collections.abc import Mapping, Sequence

from jax.sharding import Mesh, NamedSharding, PartitionSpec

from .mesh import AXES

#: For each logical axis, alternatives in order of preference: the mesh axes to split it over. The
#: first one serves whose axes the mesh has and no other axis of the same array has taken. A logical
#: axis that is not named, or has no fitting alternative, is replicated.
Rules = Mapping[str, Sequence[Sequence[str]]]

_WIDTHS = (("expert", "tensor"), ("tensor",), ("expert",))
#: Tensor parallelism (Shoeybi et al. 2019): heads and feed-forward columns are split, so that each
#: attention and each MLP block needs one all-reduce. Devices that hold different experts split the
#: rest of the model among them too, as they see the same tokens.
RULES: Rules = types.MappingProxyType(
    {
        "vocab": _WIDTHS,
        "heads": _WIDTHS,
        "kv_heads": _WIDTHS,
        "experts": (("expert",),),
        "ff": _WIDTHS,
        "slots": (("data",),),
        "pages": (("data",),),
        "context": (("sequence",),),
    }
)


@dataclasses.dataclass(frozen=True)
class Split:
    """How a mesh divides a model: sizes and rules, hashable, so that a step can be static in it.

    Without a mesh nothing is split, and steps hold no collectives.

    Attributes:
      mesh: name and size of each axis.
      rules: as `Rules`, but only of what applies on this mesh.
    """

    mesh: tuple[tuple[str, int], ...] = ()
    rules: tuple[tuple[str, tuple[tuple[str, ...], ...]], ...] = ()

    def resolve(self, axes: Sequence[str | None]) -> tuple[tuple[str, ...], ...]:
        """The mesh axes that each logical axis of one array is split over; empty for none."""
        rules, taken = dict(self.rules), set[str]()
        found: list[tuple[str, ...]] = []
        for name in axes:
            fitting = (target for target in rules.get(name or "", ()) if not taken & {*target})
            target = next(fitting, ())
            taken |= {*target}
            found.append(target)
        return tuple(found)

    def axes(self, name: str) -> tuple[str, ...]:
        """The mesh axes that an array of this one logical axis is split over."""
        return self.resolve((name,))[0]

    def size(self, axes: Sequence[str]) -> int:
        """How many parts these mesh axes make."""
        sizes = dict(self.mesh)
        return math.prod(sizes[axis] for axis in axes)

    def degree(self, name: str) -> int:
        """How many parts a logical axis is split into."""
        return self.size(self.axes(name))

    def spec(self, axes: Sequence[str | None]) -> PartitionSpec:
        """The partition of an array with these logical axes."""
        return PartitionSpec(*(target or None for target in self.resolve(axes)))

    def __str__(self) -> str:
        return ",".join(f"{name}:{size}" for name, size in self.mesh)


#: Of one device.
WHOLE = Split()


def split_of(mesh: Mesh, rules: Rules | None = None) -> Split:
    """How `mesh` divides models by `RULES`, and `rules` in their place for the axes these name.

    Raises:
      ValueError: where KV heads would be split otherwise than query heads.
    """
    merged = {**RULES, **(rules or {})}
    wide = {name for name, size in mesh.shape.items() if size > 1}
    kept = {
        name: tuple(tuple(target) for target in targets if target and wide.issuperset(target))
        for name, targets in merged.items()
    }
    split = Split(
        tuple((str(name), size) for name, size in mesh.shape.items()),
        tuple((name, targets) for name, targets in sorted(kept.items()) if targets),
    )
    if split.axes("heads") != split.axes("kv_heads"):
        raise ValueError("rules split 'heads' and 'kv_heads' differently; give them one rule")
    return split


def sharding(
    axes: Sequence[str | None], shape: Sequence[int], mesh: Mesh, rules: Rules | None = None
) -> NamedSharding:
    """Where an array of `shape` with these logical axes lies on `mesh`, as it is.

    For arrays that are kept whole, in a checkpoint or for steps of one's own under `jit`: axes that
    do not divide are replicated. What steps on a mesh take is padded instead; see
    `models/placing/placement.py`.
    """
    split = split_of(mesh, rules)
    targets = split.resolve(axes)
    fitting = (
        target if target and size % split.size(target) == 0 else None
        for target, size in zip(targets, shape, strict=True)
    )
    return NamedSharding(mesh, PartitionSpec(*fitting))


def parse_rules(text: str) -> dict[str, tuple[tuple[str, ...], ...]]:
    """Rules as a flag has them: `ff=expert+tensor|tensor,vocab=` splits `ff` over both axes or else
    one, and replicates `vocab`.

    Raises:
      ValueError: for a logical axis that `RULES` does not have, or a mesh axis that none can have.
    """
    rules: dict[str, tuple[tuple[str, ...], ...]] = {}
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        name, _, targets = (piece.strip() for piece in part.partition("="))
        if name not in RULES:
            raise ValueError(f"no rule is for '{name}'; rules are for {', '.join(RULES)}")
        split = (target.split("+") for target in targets.split("|") if target)
        rules[name] = tuple(tuple(axis.strip() for axis in target) for target in split)
        unknown = [axis for target in rules[name] for axis in target if axis not in AXES]
        if unknown:
            raise ValueError(f"a mesh has no axis '{unknown[0]}'; use {', '.join(AXES)}")
    return rules
