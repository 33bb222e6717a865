"""The one exception type that users see as a single line."""

from __future__ import annotations


class StokerError(Exception):
    """A bad file, flag or request, in one sentence: what, which value, what to do.

    Commands print it as one line and exit with 1; the library raises it as it is.
    """


def one_line(error: Exception) -> str:
    """What an error of others says, without line breaks and not at length."""
    return " ".join(str(error).split())[:500]
