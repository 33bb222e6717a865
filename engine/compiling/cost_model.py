"""Why XLA's cost model of a program says other bytes than the program moves in memory.

The model (`xla/service/hlo_cost_analysis.cc`, and what compilers for TPUs make of it) adds up
operands and results of every instruction, wherever they lie; of what custom calls do it knows
nothing. Its rules are applied here to the text of the program; what they do not explain of its
figure is left over, and said.
"""

from __future__ import annotations

import dataclasses
import re

from .hlo import (
    CALLS,
    FREE,
    SLICES,
    UPDATES,
    Array,
    CallBytes,
    Computation,
    Instruction,
    Program,
    logical,
)


@dataclasses.dataclass(frozen=True)
class Surplus:
    """What the cost model counts more than a program moves, or less. In bytes.

    Attributes:
      kernels: what custom calls move, as the program is read; the model takes them for nothing.
      copies: prefetches to vector memory and back: the model counts source and destination at their
        start, some the source once more, and the destination again at their end.
      vector_memory: what other instructions read and write there.
      whole_arrays: arrays of which rows are looked up, or updated in place.
      branches: the dearest of a conditional's instead of the cheapest.
      loops: bodies that the model counts once, however often they run.
      padding: what tiles pad, of arrays in either memory.
      other: what is left of the model's figure, by rules that are not known here.
    """

    kernels: float = 0
    copies: float = 0
    vector_memory: float = 0
    whole_arrays: float = 0
    branches: float = 0
    loops: float = 0
    padding: float = 0
    other: float = 0

    @property
    def total(self) -> float:
        """All of it: the model's figure less the program's."""
        return sum(dataclasses.astuple(self))

    def __add__(self, more: Surplus) -> Surplus:
        pairs = zip(dataclasses.astuple(self), dataclasses.astuple(more), strict=True)
        return Surplus(*(one + other for one, other in pairs))


def explain(program: Program, model_bytes: float, call: CallBytes | None = None) -> Surplus:
    """Why the cost model says `model_bytes` where `program.bytes(call)` says something else."""
    found = _surplus(program, program.entry, call)
    known = program.bytes(call) + found.total
    return dataclasses.replace(found, other=model_bytes - known)


def _surplus(program: Program, name: str, call: CallBytes | None) -> Surplus:
    """What the model's rules make of one computation, beyond what it moves."""
    computation, total = program.computations[name], Surplus()
    for one in computation.values():
        if one.op == "conditional":
            total += _of_branches(program, one, call)
        elif one.op == "while":
            body = one.called[0]
            more = (program.trips(one) - 1) * program.bytes(call, body)
            total += _surplus(program, body, call) + Surplus(loops=-more)
        elif one.op in CALLS:
            total += _surplus(program, one.called[0], call)
        else:
            total += _of_instruction(program, one, computation, call)
    return total


def _of_branches(program: Program, one: Instruction, call: CallBytes | None) -> Surplus:
    moved = {branch: program.bytes(call, branch) for branch in one.called}
    surplus = {branch: _surplus(program, branch, call) for branch in one.called}
    modelled = {branch: moved[branch] + surplus[branch].total for branch in one.called}
    cheapest = min(moved, key=lambda branch: moved[branch])
    more = max(modelled.values()) - modelled[cheapest]
    return surplus[cheapest] + Surplus(branches=more)


def _of_instruction(
    program: Program, one: Instruction, computation: Computation, call: CallBytes | None
) -> Surplus:
    moved = program.moved(one, computation, call)
    real = moved.read + moved.write
    if one.op == "custom-call":
        return Surplus(kernels=-real)
    if one.op in ("call-done", "async-done"):
        return Surplus()
    if one.op.endswith(("-start", "-done")):
        return Surplus(copies=_modelled_copy(one) - real)
    arrays = _modelled(program, one, computation)
    local = sum(size for array, size in arrays if array.local)
    every = sum(size for _, size in arrays)
    padding = sum(size * array.padding / array.nbytes for array, size in arrays if array.nbytes)
    return Surplus(vector_memory=local, whole_arrays=every - local - real, padding=padding)


#: Of an asynchronous copy's start, how often its destination counts: as what is read and written,
#: and of a whole array's the source once more, which the result names.
_AT_START = {"copy-start": 3, "slice-start": 2}


def _modelled_copy(one: Instruction) -> float:
    if one.op.endswith("-done"):
        return logical(one.results)
    into = one.results[:1] if one.op == "copy-start" else one.results[1:2] or one.results
    return _AT_START.get(one.op, 2) * logical(into)


def _modelled(
    program: Program, one: Instruction, computation: Computation
) -> list[tuple[Array, float]]:
    """Arrays that the model has one instruction read or write, and how many bytes of each."""
    if one.op in FREE:
        return []
    operands = [array for name in one.operands for array in computation[name].results]
    results = [(array, float(array.nbytes)) for array in one.results]
    if one.op in SLICES:
        return [(operands[0], logical(one.results)), *results]
    if one.op in UPDATES:
        update = float(operands[UPDATES[one.op]].nbytes)
        return [(operands[UPDATES[one.op]], update), (one.results[0], update)]
    if one.op != "fusion":
        return [*((array, float(array.nbytes)) for array in operands), *results]
    fused, tiled = one.called[0], _CUSTOM in one.text
    reads = [
        (computation[name].results[0], _fused_read(program, fused, number, tiled))
        for number, name in enumerate(one.operands)
    ]
    updated = _updated(program, fused, tiled)
    return [*reads, (one.results[0], updated)] if updated is not None else [*reads, *results]


#: Fusions of compilers for TPUs, where a row that is looked up or updated counts as all tiles that
#: hold some of it.
_CUSTOM = "kind=kCustom"
_TILE = re.compile(r"\bT\((\d+)")


def _fused_read(program: Program, fused: str, number: int, tiled: bool = False) -> float:
    """Bytes that the model has a fusion read of a parameter: slices, else all of it once."""
    computation = program.computations[fused]
    tag = f"parameter({number})"
    parameter = next(one for one in computation.values() if tag in one.text)
    whole, sliced, once = logical(parameter.results), 0.0, 0.0
    for one in computation.values():
        for place, name in enumerate(one.operands):
            if name != parameter.name:
                continue
            if one.op == "fusion":
                sliced += _fused_read(program, one.called[0], place)
            elif one.op in ("slice", "dynamic-slice"):
                sliced += logical(one.results) if place == 0 else 0
            elif one.op == "dynamic-update-slice" and place == 0:
                sliced += logical(computation[one.operands[1]].results)
            elif one.op == "gather" and place == 0 and tiled:
                sliced += _tile_rows(parameter) * logical(one.results)
            elif one.op == "scatter" and place == 0 and tiled:
                sliced += _tile_rows(parameter) * logical(computation[one.operands[2]].results)
            else:
                once = whole
    return sliced + once


def _tile_rows(one: Instruction) -> int:
    """How many rows lie in a tile: elements, where an array has one axis."""
    tile = _TILE.search(one.text)
    return int(tile[1]) if tile else 1


def _updated(program: Program, fused: str, tiled: bool) -> float | None:
    """Bytes that the model has a fusion write, where that is an update in place."""
    computation = program.computations[fused]
    root = next(one for one in computation.values() if one.root)
    while root.op == "bitcast":
        root = computation[root.operands[0]]
    if root.op == "dynamic-update-slice":
        return logical(computation[root.operands[1]].results)
    if root.op == "scatter" and tiled:
        return _tile_rows(root) * logical(computation[root.operands[2]].results)
    return None
