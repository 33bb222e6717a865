"""How every command runs: its flags, its help, its errors as one line, its exit status."""

from __future__ import annotations

import dataclasses
import functools
import io
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from absl import flags

from ..models.errors import StokerError
from .memory import keep_freed_memory

#: The commands, each `COMMAND` of the module of that name, and what they do.
SUMMARIES = {
    "generate": "continues a text or answers a question, streamed",
    "chat": "a conversation in the terminal",
    "score": "perplexity and log-probabilities of a text",
    "inspect": "what a checkpoint holds, from its headers alone",
    "convert": "a model as a checkpoint that loads fast, quantised if asked for",
    "compile": "what compilers make of every step, for hardware that need not be there",
    "bench": "speed of prefill and decode, beside what the hardware allows",
}

#: Exit statuses: a failed run, wrong usage, and an interruption, as shells number it.
FAILED, USAGE, INTERRUPTED = 1, 2, 130


@dataclasses.dataclass(frozen=True)
class Command:
    """One `stoker <name>`.

    Attributes:
      name: as typed; one of `SUMMARIES`.
      define_flags: defines the command's flags on a `FlagValues` of its own.
      run: does the work with parsed flags; a `StokerError` becomes one line and exit status 1.
      load: makes the model, for commands that run one, which several processes may share; `run`
        is then given a function that calls it, too.
    """

    name: str
    define_flags: Callable[[flags.FlagValues], None]
    run: Callable[..., None]
    load: Callable[[flags.FlagValues], Any] | None = None

    def main(self, arguments: Sequence[str] | None = None) -> int:
        """Parses `arguments` (those of the process if None), runs, and returns the exit status."""
        values = flags.FlagValues()
        self.define_flags(values)
        given = list(sys.argv[1:] if arguments is None else arguments)
        _tolerate_narrow_terminals()
        if {"--help", "-help", "-h", "--helpfull"} & set(given):
            print(self.help(values))
            return 0
        try:
            rest = values([f"stoker {self.name}", *given])[1:]
        except flags.Error as error:
            return self._fail(f"{error}; see stoker {self.name} --help", USAGE)[0]
        if rest:
            problem = f"unexpected argument {rest[0]!r}: every option is a flag, --name=value"
            return self._fail(f"{problem}; see stoker {self.name} --help", USAGE)[0]
        return self.attempt(functools.partial(self._work, values))[0]

    def attempt(self, work: Callable[[], int]) -> tuple[int, str]:
        """The exit status of `work`, and what went wrong, if so, which has been printed."""
        try:
            status = work()
            sys.stdout.flush()
        except StokerError as error:
            return self._fail(str(error), FAILED)
        except MemoryError:
            return self._fail("out of memory", FAILED)
        except RuntimeError as error:
            # XLA's own error for memory; it has no type of its own.
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            return self._fail(f"out of memory: {str(error).splitlines()[0]}", FAILED)
        except KeyboardInterrupt:
            print(file=sys.stderr)
            return INTERRUPTED, ""
        except BrokenPipeError:
            # The reader has gone (as `head` does): nothing is left to say, nor anyone to hear it.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return FAILED, "nobody reads its output"
        return status, ""

    def _work(self, values: flags.FlagValues) -> int:
        if self.load is None:
            self.run(values)
            return 0
        from . import hosts  # with JAX, for which `stoker --help` does not wait

        if hosts.wants_hosts(values):
            return hosts.run_shared(self, values)
        self.run(values, functools.partial(self.loaded, values))
        return 0

    def loaded(self, values: flags.FlagValues) -> Any:
        """The model, for steps to follow."""
        assert self.load is not None
        model = self.load(values)
        # Not sooner: what loading has used is better given back.
        keep_freed_memory()
        return model

    def help(self, values: flags.FlagValues) -> str:
        """The summary and every flag with its default."""
        lines = [f"stoker {self.name}: {SUMMARIES[self.name]}", "", "flags:"]
        for name in values:
            flag = values[name]
            switch = f"--[no]{name}" if flag.boolean else f"--{name}=…"
            default = "" if flag.default in (None, "", False) else f" (default: {flag.default})"
            lines.append(f"  {switch}\n      {flag.help}{default}")
        return "\n".join(lines)

    def _fail(self, problem: str, status: int) -> tuple[int, str]:
        # Names of a hostile file must not move the cursor.
        line = "".join(
            letter if letter.isprintable() else ascii(letter)[1:-1]
            for letter in " ".join(problem.split())
        )
        sys.stdout.flush()
        print(f"stoker {self.name}: {line}", file=sys.stderr)
        return status, line


def _tolerate_narrow_terminals() -> None:
    """Shows a question mark for what the terminal's encoding lacks, instead of failing."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def make_folder(flag: str, path: str) -> None:
    """Makes the folder that a flag names, unless it is there.

    Raises:
      StokerError: it cannot be made, or is a file.
    """
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = error.strerror or error
        raise StokerError(f"--{flag}: cannot make the folder {path!r}: {reason}") from None


def write_output(flag: str, path: str, text: str) -> None:
    """Writes the file that a flag names, or to standard output where that is -.

    Raises:
      StokerError: the file cannot be written.
    """
    if path == "-":
        print(text, end="")
        return
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        reason = error.strerror or error
        raise StokerError(f"--{flag}: cannot write {path!r}: {reason}") from None
