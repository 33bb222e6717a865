"""Stop strings in a stream of text."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Cuts a stream of text at the first stop string, holding back only what may become one.

    Attributes:
      stop: the stop string that was met.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.stop: str | None = None

    def push(self, text: str) -> str:
        """Adds text and returns what may be shown; sets `stop` at a stop string."""
        self._held += text
        # The one that ends first, as if characters came one by one: then how text is cut into
        # tokens changes nothing, even where one stop string holds another.
        starts = {stop: self._held.find(stop) for stop in self._stops}
        found = [(at + len(stop), at, stop) for stop, at in starts.items() if at >= 0]
        if found:
            _, at, self.stop = min(found)
            shown, self._held = self._held[:at], ""
            return shown
        keep = max((_overlap(self._held, stop) for stop in self._stops), default=0)
        shown = self._held[: len(self._held) - keep]
        self._held = self._held[len(self._held) - keep :]
        return shown

    @property
    def stopped(self) -> bool:
        """A stop string was met."""
        return self.stop is not None

    def flush(self) -> str:
        """What was held back, at the end of a reply that met no stop string."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """The longest end of `text` that begins `stop`, in characters."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
