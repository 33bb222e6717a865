"""A progress bar for many replies."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
)

from .replies import Reply


@contextlib.contextmanager
def reply_bar(total: int, wanted: bool) -> Iterator[Callable[[list[Reply]], None]]:
    """A bar where standard error is a terminal; yields what tells it how far the replies are."""
    console = Console(stderr=True)
    if not wanted or not console.is_terminal:
        yield lambda _: None
        return
    columns = (
        TextColumn("generating"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[tokens]} tokens"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("generating", total=total, tokens=0)

        def show(answers: list[Reply]) -> None:
            done = sum(answer.done for answer in answers)
            tokens = sum(answer.generated_tokens for answer in answers)
            progress.update(task, completed=done, tokens=tokens)

        yield show
