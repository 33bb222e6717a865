"""`stoker <command> --flags`: the console script."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Sequence

from .command import INTERRUPTED, SUMMARIES, USAGE
from .memory import made_to_last


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command that the first argument names; returns the exit status.

    Args:
      arguments: the command and its flags; None: those of the process, which is then its own.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    if not given or given[0] in ("--help", "-h", "help"):
        print(overview())
        return 0 if given else USAGE
    name, *rest = given
    if name == "--version":
        from importlib.metadata import version

        print(f"stoker {version('stoker')}")
        return 0
    if name not in SUMMARIES:
        known = ", ".join(SUMMARIES)
        print(f"stoker: no command {name!r}; there are {known}. See stoker --help", file=sys.stderr)
        return USAGE
    try:
        # Imported only now: `stoker --help` should not wait for JAX.
        with made_to_last() if arguments is None else contextlib.nullcontext():
            command = importlib.import_module(f".{name}", __package__).COMMAND
    except KeyboardInterrupt:
        return INTERRUPTED
    return command.main(rest)


def overview() -> str:
    """What `stoker --help` prints."""
    width = max(map(len, SUMMARIES))
    lines = [f"  {name:{width}}  {summary}" for name, summary in SUMMARIES.items()]
    return "\n".join(
        ["stoker <command> --flags", "", *lines, "", "stoker <command> --help lists flags."]
    )


if __name__ == "__main__":
    sys.exit(main())
