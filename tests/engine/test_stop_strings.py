"""Stop strings: cut exactly, holding back no more than what may become one."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from stoker.engine.stop_strings import StopStrings

SHORT = st.text("ab\n", max_size=12)
STOPS = st.lists(st.text("ab\n", min_size=1, max_size=4), max_size=3)


def shown(stops: list[str], pieces: list[str]) -> tuple[str, bool]:
    matcher, text = StopStrings(stops), ""
    for piece in pieces:
        text += matcher.push(piece)
        if matcher.stopped:
            return text, True
    return text + matcher.flush(), False


def one_character_at_a_time(stops: list[str], text: str) -> tuple[str, bool]:
    """The rule by brute force: the reply ends as soon as it ends with a stop string."""
    for end in range(len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return text[: end - max(map(len, found))], True
    return text, False


@given(stops=STOPS, pieces=st.lists(SHORT, max_size=6))
def test_cut_is_exact_however_text_arrives(stops: list[str], pieces: list[str]) -> None:
    assert shown(stops, pieces) == one_character_at_a_time(stops, "".join(pieces))


@given(stops=STOPS, pieces=st.lists(SHORT, max_size=6))
def test_nothing_is_held_back_without_need(stops: list[str], pieces: list[str]) -> None:
    matcher, given_text, text = StopStrings(stops), "", ""
    for piece in pieces:
        given_text += piece
        text += matcher.push(piece)
        if matcher.stopped:
            return
        held = given_text[len(text) :]
        assert given_text.startswith(text)
        assert not held or any(stop.startswith(held) for stop in stops)
