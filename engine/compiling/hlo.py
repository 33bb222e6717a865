"""Reads compiled programs as XLA prints them: instructions, and the bytes that each moves.

Only what a program's own memory sees counts: arguments, temporaries and results, but nothing that
exists inside a fusion alone, or in a TPU's vector memory (`S(1)` in layouts).
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
import re
from collections.abc import Callable

_INSTRUCTION = re.compile(
    r"^\s*(?P<root>ROOT )?%(?P<name>[\w.\-]+) = (?P<type>.*?) "
    r"(?P<op>[a-z][a-z0-9\-]*)\((?P<rest>.*)$"
)
_COMPUTATION = re.compile(r"^(?P<entry>ENTRY )?%(?P<name>[\w.\-]+) \(.*\{$")
_ARRAY = re.compile(r"(?P<dtype>[a-z]\w*)\[(?P<sizes>[\d,]*)\](?P<layout>\{[^}]*\})?")
_TILED = re.compile(r"\{(?P<order>[\d,]*):T\((?P<tile>[\d,]+)\)")
_NAME = re.compile(r"%([\w.\-]+)")
_CALLED = re.compile(
    r"\b(calls|body|true_computation|false_computation|branch_computations)="
    r"(\{[^}]*\}|%[\w.\-]+)"
)
_APPLIED = re.compile(r"\bto_apply=%([\w.\-]+)")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_CONDITION = re.compile(r"\bcondition=%([\w.\-]+)")
_CONSTANT = re.compile(r"\bconstant\((\d+)\)")
#: Where an instruction comes from, not what it reads.
_KERNEL = re.compile(r'op_name="[^"]*\b(stoker_\w+)')
_TARGET = re.compile(r'custom_call_target="([^"]+)"')
#: What a fusion of XLA's for GPUs is, where Triton or a library does it.
_FUSION_KIND = re.compile(r'"fusion_backend_config":\{"kind":"(__\w+)"')
#: Custom calls that place buffers and compute nothing.
_PLACING = re.compile(
    r"AllocateBuffer|ConcatBitcast|PrepareAsyncCall\w*|Assume\w+|Gather\w+|Pin|Unpin"
)
_COLLECTIVES = ("all-reduce", "all-gather", "all-to-all", "reduce-scatter", "collective-permute")
#: What names bytes without moving them.
FREE = {
    *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all"),
    *("partition-id", "replica-id", "opt-barrier", "iota", "domain"),
}
#: What runs another computation, once.
CALLS = ("call", "call-start", "async-start")
#: What has results that others made, or that its computations make.
_HANDS_ON = {*FREE, "while", "conditional", "call", "call-done", "async-done"}
#: What reads rows of its first operand.
SLICES = {"slice", "dynamic-slice", "gather"}
#: What writes rows of its first operand in place, and which operand these are.
UPDATES = {"dynamic-update-slice": 1, "scatter": 2}


@dataclasses.dataclass(frozen=True)
class Array:
    """The type of an array in a program.

    Attributes:
      dtype: as XLA calls it: `bf16`, `s8`, `f8e4m3fn`.
      shape: its sizes.
      local: it is in a TPU's vector memory.
      tiled: elements with what tiles pad.
    """

    dtype: str
    shape: tuple[int, ...]
    local: bool
    tiled: int

    @property
    def size(self) -> int:
        """Elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes, without what tiles pad."""
        return -(-self.size * _bits(self.dtype) // 8)

    @property
    def padding(self) -> int:
        """Bytes that tiles pad."""
        return -(-self.tiled * _bits(self.dtype) // 8) - self.nbytes


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One instruction.

    Attributes:
      name: without its `%`.
      op: its opcode.
      results: the arrays that it makes.
      operands: names of instructions of the same computation.
      called: names of computations, in order.
      text: the whole line.
      root: it is what its computation returns.
    """

    name: str
    op: str
    results: tuple[Array, ...]
    operands: tuple[str, ...]
    called: tuple[str, ...]
    text: str = dataclasses.field(repr=False)
    root: bool = False

    @property
    def makes(self) -> bool:
        """Whether it makes its results, rather than names, awaits or is handed them."""
        return self.op not in _HANDS_ON and not self.op.endswith("-start")


Computation = dict[str, Instruction]


@dataclasses.dataclass(frozen=True)
class Moved:
    """Bytes that an instruction reads from memory, and writes to it."""

    read: float
    write: float


#: What a custom call moves, of its operands and results; None counts all of them once.
CallBytes = Callable[[Instruction, list[Array]], "Moved | None"]


class Program:
    """A compiled program.

    Args:
      text: what `jax.stages.Compiled.as_text()` says.
    """

    def __init__(self, text: str) -> None:
        self.computations, self.entry = _parse(text)

    def executed(self) -> list[Instruction]:
        """Instructions of the entry and of what it calls, each once: loops, and all branches."""
        return [one for computation in self.run() for one in computation.values()]

    def run(self) -> list[Computation]:
        """The entry and what it calls, but for what is inside fusions."""
        found: dict[str, Computation] = {}
        waiting = [self.entry]
        while waiting:
            name = waiting.pop()
            if name not in found:
                found[name] = self.computations[name]
                plain = (one for one in found[name].values() if one.op != "fusion")
                waiting += [called for one in plain for called in one.called]
        return list(found.values())

    def collectives(self) -> dict[str, int]:
        """How often each kind of collective occurs."""
        ops = (one.op.removesuffix("-start") for one in self.executed())
        return dict(collections.Counter(op for op in ops if op in _COLLECTIVES))

    def kernels(self) -> dict[str, int]:
        """How often each kernel is called: Stoker's by name, others by the library's or target."""
        names = (kernel_name(one) for one in self.executed())
        return dict(sorted(collections.Counter(name for name in names if name).items()))

    def largest(self, op: str) -> int:
        """Elements of the largest array that an opcode such as `all-gather` makes."""
        ops = (op, f"{op}-start")
        sizes = (array.size for one in self.executed() if one.op in ops for array in one.results)
        return max(sizes, default=0)

    def bytes(self, call: CallBytes | None = None, name: str | None = None) -> float:
        """Bytes that one call moves; of branches, what the cheapest moves.

        Branches are work that requests may ask for, such as penalties: a step without it skips
        them. A loop whose length is not known counts once.

        Args:
          call: what custom calls move.
          name: of a computation other than the program's entry.
        """
        computation, total = self.computations[name or self.entry], 0.0
        for one in computation.values():
            if one.op == "conditional":
                total += min(self.bytes(call, branch) for branch in one.called)
            elif one.op == "while":
                total += self.bytes(call, one.called[0]) * self.trips(one)
            elif one.op in CALLS:
                total += self.bytes(call, one.called[0])
            else:
                moved = self.moved(one, computation, call)
                total += moved.read + moved.write
        return total

    def trips(self, one: Instruction) -> int:
        """How often the body of a `while` runs; 1 where that is not known.

        Where the program does not say, the counter starts at zero, as JAX's loops have it.
        """
        said = _TRIPS.search(one.text)
        if said:
            return int(said[1])
        condition = _CONDITION.search(one.text)
        computation = self.computations[condition[1]] if condition else {}
        for test in computation.values():
            if test.root and test.op == "compare" and "direction=LT" in test.text:
                limit = _CONSTANT.search(computation[test.operands[1]].text)
                return int(limit[1]) if limit else 1
        return 1

    def moved(
        self, one: Instruction, computation: Computation, call: CallBytes | None = None
    ) -> Moved:
        """Bytes that one instruction reads and writes, but for those of what it calls."""
        if one.op in FREE or one.op.endswith("-done"):
            return Moved(0, 0)
        operands = [array for name in one.operands for array in computation[name].results]
        if one.op == "custom-call" and call is not None:
            special = call(one, operands)
            if special is not None:
                return special
        if one.op in SLICES:
            return Moved(logical(one.results), held(one.results))
        if one.op in UPDATES:
            update = operands[UPDATES[one.op]].nbytes
            return Moved(update, update)
        if one.op.endswith("-start"):
            # Operands, results and tokens together: what arrives was read.
            into = one.results[1:2] or one.results
            if one.op == "copy-start":
                into = one.results[:1]
            return Moved(min(held(operands), logical(into)), held(into))
        if one.op == "fusion":
            fused = one.called[0]
            read = sum(
                min(self._parameter_read(fused, number), held(computation[name].results))
                for number, name in enumerate(one.operands)
            )
            return Moved(read, self._fusion_write(fused, one.results))
        return Moved(held(operands), held(one.results))

    @functools.cache  # noqa: B019 - programs are few, and short-lived
    def _parameter_read(self, name: str, number: int) -> float:
        """Bytes of a fusion's parameter that are read, if it is in memory at all."""
        computation = self.computations[name]
        tag = f"parameter({number})"
        parameter = next(one for one in computation.values() if tag in one.text)
        whole, total = logical(parameter.results), 0.0
        waiting = [parameter.name]
        while waiting:
            source = waiting.pop()
            if computation[source].root:
                return whole
            for one in computation.values():
                if source not in one.operands:
                    continue
                places = [at for at, operand in enumerate(one.operands) if operand == source]
                if one.op == "bitcast" or self._only_renames(one):
                    waiting.append(one.name)
                elif one.op in SLICES and places == [0]:
                    total += logical(one.results)
                elif one.op in UPDATES and places == [0]:
                    continue
                elif one.op == "fusion":
                    total += sum(self._parameter_read(one.called[0], at) for at in places)
                else:
                    return whole
        return min(total, whole)

    def _only_renames(self, one: Instruction) -> bool:
        """Whether a nested fusion only calls its parameter something else, or lays it out anew."""
        return one.op == "fusion" and all(
            inner.op in ("parameter", "bitcast", "copy")
            for inner in self.computations[one.called[0]].values()
        )

    def _fusion_write(self, name: str, results: tuple[Array, ...]) -> float:
        """Bytes that a fusion writes: of an update in place, what is new."""
        computation = self.computations[name]
        root = next(one for one in computation.values() if one.root)
        while root.op == "bitcast":
            root = computation[root.operands[0]]
        if root.op in UPDATES and len(results) == 1:
            return logical(computation[root.operands[UPDATES[root.op]]].results)
        return held(results)


def kernel_name(one: Instruction) -> str | None:
    """The kernel that an instruction runs, if it is not of the compiler's own making."""
    if one.op == "fusion":
        kind = _FUSION_KIND.search(one.text)
        return kind[1] if kind else None
    if one.op != "custom-call":
        return None
    own = _KERNEL.search(one.text)
    target = _TARGET.search(one.text)
    if own:
        return own[1]
    return None if target is None or _PLACING.fullmatch(target[1]) else target[1]


def _parse(text: str) -> tuple[dict[str, Computation], str]:
    computations: dict[str, Computation] = {}
    current: Computation = {}
    entry = ""
    for line in text.splitlines():
        start = _COMPUTATION.match(line)
        if start:
            current = computations[start["name"]] = {}
            entry = start["name"] if start["entry"] else entry
            continue
        found = _INSTRUCTION.match(line)
        if found:
            called = [name for _, names in _CALLED.findall(line) for name in _NAME.findall(names)]
            if found["op"] in CALLS:
                called += [name for name in _APPLIED.findall(line) if name not in called]
            current[found["name"]] = Instruction(
                name=found["name"],
                op=found["op"],
                results=tuple(_arrays(found["type"])),
                operands=tuple(_NAME.findall(found["rest"].split(")")[0])),
                called=tuple(called),
                text=line,
                root=found["root"] is not None,
            )
    return computations, entry


def _arrays(text: str) -> list[Array]:
    return [
        _array(found["dtype"], _numbers(found["sizes"]), found["layout"] or "")
        for found in _ARRAY.finditer(text)
    ]


def _array(dtype: str, shape: tuple[int, ...], layout: str) -> Array:
    local = re.search(r"S\([1-9]", layout) is not None
    tiled, found = math.prod(shape), _TILED.match(layout)
    if found:
        # Sizes from the slowest to the fastest axis; the tile covers the last of them.
        tile = _numbers(found["tile"])
        sizes = [shape[axis] for axis in reversed(_numbers(found["order"]))]
        sizes = [1] * (len(tile) - len(sizes)) + sizes
        whole = len(sizes) - len(tile)
        padded = (-(-size // of) * of for size, of in zip(sizes[whole:], tile, strict=True))
        tiled = math.prod(sizes[:whole]) * math.prod(padded)
    return Array(dtype, shape, local, tiled)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, filter(None, text.split(","))))


def _bits(dtype: str) -> int:
    if dtype == "pred":
        return 8
    digits = re.search(r"\d+", dtype)
    return int(digits[0]) if digits else 0


def held(arrays: list[Array] | tuple[Array, ...]) -> float:
    """Bytes of those that are in memory."""
    return sum(array.nbytes for array in arrays if not array.local)


def logical(arrays: list[Array] | tuple[Array, ...]) -> float:
    """Bytes of all of them."""
    return sum(array.nbytes for array in arrays)
