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
_NAME = re.compile(r"%([\w.\-]+)")
_CALLED = re.compile(
    r"\b(calls|body|true_computation|false_computation|branch_computations)="
    r"(\{[^}]*\}|%[\w.\-]+)"
)
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_KERNEL = re.compile(r"\b(stoker_\w+)")
_TARGET = re.compile(r'custom_call_target="([^"]+)"')
#: What a fusion of XLA's for GPUs is, where Triton or a library does it.
_FUSION_KIND = re.compile(r'"fusion_backend_config":\{"kind":"(__\w+)"')
#: Custom calls that place buffers and compute nothing.
_PLACING = re.compile(
    r"AllocateBuffer|ConcatBitcast|PrepareAsyncCall\w*|Assume\w+|Gather\w+|Pin|Unpin"
)
_COLLECTIVES = ("all-reduce", "all-gather", "all-to-all", "reduce-scatter", "collective-permute")
#: What names bytes without moving them.
_FREE = {
    *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all"),
    *("partition-id", "replica-id", "opt-barrier", "iota", "domain"),
}
_SLICES = {"slice", "dynamic-slice", "gather"}
_UPDATES = {"dynamic-update-slice": 1, "scatter": 2}


@dataclasses.dataclass(frozen=True)
class Array:
    """The type of an array in a program.

    Attributes:
      dtype: as XLA calls it: `bf16`, `s8`, `f8e4m3fn`.
      shape: its sizes.
      local: it is in a TPU's vector memory.
    """

    dtype: str
    shape: tuple[int, ...]
    local: bool

    @property
    def size(self) -> int:
        """Elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes, without what tiles pad."""
        return -(-self.size * _bits(self.dtype) // 8)


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
        found: list[Instruction] = []
        seen: set[str] = set()
        waiting = [self.entry]
        while waiting:
            name = waiting.pop()
            if name in seen:
                continue
            seen.add(name)
            for instruction in self.computations[name].values():
                found.append(instruction)
                if instruction.op != "fusion":
                    waiting += instruction.called
        return found

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

    def bytes(self, call: CallBytes | None = None) -> float:
        """Bytes that one call moves; of branches, what the cheapest moves.

        Branches are work that requests may ask for, such as penalties: a step without it skips
        them. A loop whose length is not known counts once.
        """
        return self._bytes(self.entry, call)

    def _bytes(self, name: str, call: CallBytes | None) -> float:
        computation, total = self.computations[name], 0.0
        for one in computation.values():
            if one.op == "conditional":
                total += min(self._bytes(branch, call) for branch in one.called)
            elif one.op == "while":
                trips = _TRIPS.search(one.text)
                body = self._bytes(one.called[0], call)
                total += body * (int(trips[1]) if trips else 1)
            elif one.op == "call":
                total += self._bytes(one.called[0], call)
            else:
                moved = self.moved(one, computation, call)
                total += moved.read + moved.write
        return total

    def moved(
        self, one: Instruction, computation: Computation, call: CallBytes | None = None
    ) -> Moved:
        """Bytes that one instruction reads and writes, but for those of what it calls."""
        if one.op in _FREE or one.op.endswith("-done"):
            return Moved(0, 0)
        operands = [array for name in one.operands for array in computation[name].results]
        if one.op == "custom-call" and call is not None:
            special = call(one, operands)
            if special is not None:
                return special
        if one.op in _SLICES:
            return Moved(_logical(one.results), _held(one.results))
        if one.op in _UPDATES:
            update = operands[_UPDATES[one.op]].nbytes
            return Moved(update, update)
        if one.op.endswith("-start"):
            # Operands, results and tokens together: what arrives was read.
            into = one.results[1:2] or one.results
            if one.op == "copy-start":
                into = one.results[:1]
            return Moved(min(_held(operands), _logical(into)), _held(into))
        if one.op == "fusion":
            fused = one.called[0]
            read = sum(
                min(self._parameter_read(fused, number), _held(computation[name].results))
                for number, name in enumerate(one.operands)
            )
            return Moved(read, self._fusion_write(fused, one.results))
        return Moved(_held(operands), _held(one.results))

    @functools.cache  # noqa: B019 - programs are few, and short-lived
    def _parameter_read(self, name: str, number: int) -> float:
        """Bytes of a fusion's parameter that are read, if it is in memory at all."""
        computation = self.computations[name]
        tag = f"parameter({number})"
        parameter = next(one for one in computation.values() if tag in one.text)
        whole, total = _logical(parameter.results), 0.0
        waiting = [parameter.name]
        while waiting:
            source = waiting.pop()
            if computation[source].root:
                return whole
            for one in computation.values():
                if source not in one.operands:
                    continue
                places = [at for at, operand in enumerate(one.operands) if operand == source]
                if one.op == "bitcast" or self._is_bitcast(one):
                    waiting.append(one.name)
                elif one.op in _SLICES and places == [0]:
                    total += _logical(one.results)
                elif one.op in _UPDATES and places == [0]:
                    continue
                elif one.op == "fusion":
                    total += sum(self._parameter_read(one.called[0], at) for at in places)
                else:
                    return whole
        return min(total, whole)

    def _is_bitcast(self, one: Instruction) -> bool:
        """Whether a fusion only calls its parameter something else."""
        return one.op == "fusion" and all(
            inner.op in ("parameter", "bitcast")
            for inner in self.computations[one.called[0]].values()
        )

    def _fusion_write(self, name: str, results: tuple[Array, ...]) -> float:
        """Bytes that a fusion writes: of an update in place, what is new."""
        computation = self.computations[name]
        root = next(one for one in computation.values() if one.root)
        while root.op == "bitcast":
            root = computation[root.operands[0]]
        if root.op in _UPDATES and len(results) == 1:
            return _logical(computation[root.operands[_UPDATES[root.op]]].results)
        return _held(results)


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
        Array(
            found["dtype"],
            tuple(map(int, filter(None, found["sizes"].split(",")))),
            re.search(r"S\([1-9]", found["layout"] or "") is not None,
        )
        for found in _ARRAY.finditer(text)
    ]


def _bits(dtype: str) -> int:
    if dtype == "pred":
        return 8
    digits = re.search(r"\d+", dtype)
    return int(digits[0]) if digits else 0


def _held(arrays: list[Array] | tuple[Array, ...]) -> float:
    """Bytes of those that are in memory."""
    return sum(array.nbytes for array in arrays if not array.local)


def _logical(arrays: list[Array] | tuple[Array, ...]) -> float:
    """Bytes of all of them."""
    return sum(array.nbytes for array in arrays)
