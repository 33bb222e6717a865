"""Work of several threads, in order and within memory."""

import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.models.host_threads import at_once, usable_cores


@settings(deadline=None)
@given(sizes=st.lists(st.integers(0, 50), max_size=30), room=st.integers(1, 80))
def test_results_come_in_order_and_no_more_than_the_room_is_taken(sizes, room):
    lock, taken, most = threading.Lock(), 0, 0

    def work(index: int) -> int:
        nonlocal taken, most
        with lock:
            taken += sizes[index]
            most = max(most, taken)
        return index

    found = []
    for index in at_once(work, range(len(sizes)), sizes, threads=3, room=room):
        found.append(index)
        with lock:
            taken -= sizes[index]
    assert found == list(range(len(sizes)))
    assert most <= max([room, *sizes])


def test_threads_work_beside_each_other():
    together = threading.Barrier(3, timeout=60)
    assert sorted(at_once(lambda _: together.wait(), range(6), [1] * 6, threads=3)) == [
        *(0, 0),
        *(1, 1),
        *(2, 2),
    ]


def test_one_thread_is_the_callers_own():
    own = threading.get_ident()
    assert list(at_once(lambda _: threading.get_ident(), range(3), [1] * 3, threads=1)) == [own] * 3


@pytest.mark.parametrize("threads", [1, 2, None])
def test_an_error_is_raised_in_its_turn_and_ends_the_work(threads):
    begun = []

    def work(index: int) -> int:
        begun.append(index)
        if index == 2:
            raise OSError("damaged")
        return index

    found = []
    with pytest.raises(OSError, match="damaged"):
        for index in at_once(work, range(1000), [1] * 1000, threads):
            found.append(index)
    assert found == [0, 1]
    assert len(begun) <= 3 + 2 * (threads or usable_cores())
    assert threading.active_count() < 50


def test_after_an_error_nothing_more_is_begun():
    begun, failing, more = [], threading.Event(), threading.Event()

    def work(index: int) -> None:
        begun.append(index)
        if index == 0:
            failing.wait(60)
            more.wait(1)
        elif index == 1:
            failing.set()
            raise OSError("damaged")
        else:
            more.set()

    with pytest.raises(OSError, match="damaged"):
        list(at_once(work, range(1000), [1] * 1000, threads=2))
    assert begun == [0, 1]


def test_each_item_needs_a_size():
    with pytest.raises(ValueError, match="zip"):
        list(at_once(str, range(3), [1, 1], threads=2))
