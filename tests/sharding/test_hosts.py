"""How processes find and watch each other, over sockets of this process."""

from __future__ import annotations

import dataclasses
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from stoker.sharding.frames import Frame, decode, encode, receive
from stoker.sharding.meeting import HostsError, gather, listen, meet, split_address
from stoker.sharding.watch import Peer, Watch

FACTS = {"stoker": "1", "jax": "2"}
WAIT_S = 20.0


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with listen("127.0.0.1", 0) as made:
        yield made


def port(listener: socket.socket) -> int:
    return listener.getsockname()[1]


def attempt(work: Callable[[], Any]) -> Any:
    try:
        return work()
    except HostsError as error:
        return str(error)


def meeting(
    listener: socket.socket,
    count: int,
    followers: list[tuple[int, int, dict[str, str]]],
    timeout_s: float = WAIT_S,
) -> tuple[Any, list[Any]]:
    """What process 0 of `count` and followers (index, count, facts) find, or their errors."""
    where = port(listener)
    with ThreadPoolExecutor(8) as pool:

        def join(index: int, told: int, facts: dict[str, str]) -> Future:
            return pool.submit(
                attempt, lambda: meet("127.0.0.1", where, index, told, facts, timeout_s)
            )

        others = [join(*follower) for follower in followers]
        welcome = {"jax_port": 5}
        found = attempt(lambda: gather(listener, count, FACTS, welcome, timeout_s))
        return found, [other.result() for other in others]


def close(*peers: Peer) -> None:
    for peer in peers:
        peer.control.close()
        peer.steps.close()


ARRAYS = hnp.arrays(
    st.sampled_from([np.bool_, np.int32, np.uint32, np.float32, np.int64, np.uint8]),
    hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=5),
)


@given(st.integers(0, 255), st.integers(0, 65535), st.integers(-(2**31), 2**31 - 1), st.data())
def test_a_frame_arrives_as_it_was_sent(code: int, target: int, value: int, data) -> None:
    arrays = tuple(data.draw(st.lists(ARRAYS, max_size=4)))
    frame = decode(encode(Frame(code, target, value, arrays))[4:])
    assert (frame.code, frame.target, frame.value) == (code, target, value)
    for found, sent in zip(frame.arrays, arrays, strict=True):
        assert found.dtype == sent.dtype and found.shape == sent.shape
        np.testing.assert_array_equal(found, sent)


@given(st.binary(max_size=40))
def test_what_is_no_frame_is_refused(data: bytes) -> None:
    try:
        decode(data)
    except ValueError as error:
        assert "frame" in str(error) or "buffer" in str(error)


def test_a_step_travels_in_few_bytes() -> None:
    """32 sequences that decode: their slots, their limits, and a page that one of them gained."""
    slots = np.arange(32, dtype=np.int32)
    pages = np.array([3, 7, 1, 900], np.int32)
    assert len(encode(Frame(5, 1, 1, (pages, slots, slots + 100)))) < 320


def test_frames_follow_each_other_on_a_connection() -> None:
    left, right = socket.socketpair()
    with left, right:
        for value in range(3):
            left.sendall(encode(Frame(1, 2, value, (np.arange(value, dtype=np.int32),))))
        left.shutdown(socket.SHUT_WR)
        assert [receive(right).value for _ in range(3)] == [0, 1, 2]
        with pytest.raises(ConnectionError):
            receive(right)


def test_processes_find_each_other(listener: socket.socket) -> None:
    found, others = meeting(listener, 3, [(2, 3, FACTS), (1, 3, FACTS)])
    assert [peer.index for peer in found] == [1, 2]
    assert [welcome for _, welcome in others] == [{"jax_port": 5}] * 2
    by_index = {1: others[1][0], 2: others[0][0]}
    for peer in found:
        peer.steps.sendall(encode(Frame(1, peer.index)))
        assert receive(by_index[peer.index].steps).target == peer.index
    close(*found, *by_index.values())


@pytest.mark.parametrize(
    ("followers", "problem"),
    [
        ([(1, 4, FACTS)], "process 1 (127.0.0.1) was given --num_processes=4, but process 0 3"),
        ([(3, 3, FACTS)], "two processes have --process_id=3"),
        ([(1, 3, FACTS), (1, 3, FACTS)], "two processes have --process_id=1 (on 127.0.0.1 and"),
        ([(1, 3, {**FACTS, "jax": "9"})], "has jax 9, but process 0 2; install the same"),
    ],
)
def test_a_process_that_does_not_belong_ends_the_meeting(
    listener: socket.socket, followers, problem: str
) -> None:
    found, others = meeting(listener, 3, followers)
    assert problem in found
    assert all(other == found or "before all processes had joined" in other for other in others)
    assert found in others


def test_waiting_has_an_end(listener: socket.socket) -> None:
    where = port(listener)
    found, others = meeting(listener, 4, [(2, 4, FACTS)], timeout_s=0.5)
    assert found.startswith("processes 1, 3 of 4 did not join within 0.5 s; start all")
    assert others == [found]
    # Nobody listens there any more.
    alone = attempt(lambda: meet("127.0.0.1", where, 1, 2, FACTS, 0.3))
    assert f"process 0 did not answer at 127.0.0.1:{where}" in alone


def test_strangers_on_the_port_are_sent_off(listener: socket.socket) -> None:
    with socket.create_connection(("127.0.0.1", port(listener))) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
        found, others = meeting(listener, 2, [(1, 2, FACTS)])
        assert [peer.index for peer in found] == [1]
        close(*found, others[0][0])


def test_a_port_that_is_taken_is_an_error(listener: socket.socket) -> None:
    taken = port(listener)
    with pytest.raises(HostsError, match=f"cannot listen on 127.0.0.1:{taken}"):
        listen("127.0.0.1", taken)


def test_addresses() -> None:
    assert split_address("a.example:70") == ("a.example", 70)
    assert split_address("[::1]:70") == ("::1", 70)
    for wrong in ("", "a", "a:", ":70", "a:0", "a:65536", "::1:70", "a:7a"):
        with pytest.raises(HostsError, match="is no address; give host:port"):
            split_address(wrong)


@dataclasses.dataclass
class Ends:
    """How processes ended, as the watch would have ended them."""

    found: dict[str, tuple[str, int]] = dataclasses.field(default_factory=dict)
    came: threading.Semaphore = dataclasses.field(default_factory=lambda: threading.Semaphore(0))

    def of(self, name: str) -> Callable[[str, int], None]:
        def end(message: str, status: int) -> None:
            # The watch would have ended with the process; here it lives on, and may end again.
            if name not in self.found:
                self.found[name] = (message, status)
                self.came.release()

        return end

    def wait(self, count: int) -> dict[str, tuple[str, int]]:
        for _ in range(count):
            assert self.came.acquire(timeout=WAIT_S)
        return self.found


@dataclasses.dataclass
class Job:
    """Process 0 and two others, each watching; `peers[i]` is process 0 as process i sees it."""

    ends: Ends
    leader: Watch
    others: dict[int, Watch]
    peers: dict[int, Peer]


@pytest.fixture
def job() -> Iterator[Job]:
    ends, peers, seen = Ends(), {}, []
    for index in (1, 2):
        near, far = socket.socketpair(), socket.socketpair()
        seen.append(Peer(index, f"host{index}", near[0], far[0]))
        peers[index] = Peer(0, "host0", near[1], far[1])
    leader = Watch(seen, silence_s=3.0, end=ends.of("0"))
    others = {i: Watch([peer], end=ends.of(str(i))) for i, peer in peers.items()}
    yield Job(ends, leader, others, peers)
    close(*seen, *peers.values())


def test_a_lost_process_ends_all_and_is_named(job: Job) -> None:
    job.peers[1].control.shutdown(socket.SHUT_RDWR)
    ends = job.ends.wait(3)
    text = "process 1 (host1) was lost: its connection closed; see what it printed last, then start"
    assert ends["0"][0].startswith(f"stoker: {text}") and ends["0"][1] == 1
    assert ends["2"][0].startswith(f"stoker: ended with the others: {text}") and ends["2"][1] == 1


def test_a_failure_is_told_to_all(job: Job) -> None:
    job.others[2].fail("process 2 failed: no such file", 1)
    ends = job.ends.wait(3)
    assert ends["2"] == ("stoker: process 2 failed: no such file", 1)
    for index in "01":
        assert ends[index] == ("stoker: ended with the others: process 2 failed: no such file", 1)


def test_silence_counts_as_loss() -> None:
    """A machine that vanished closes no connection; one that speaks is not lost."""
    ends, near, far = Ends(), socket.socketpair(), socket.socketpair()
    silent = Peer(1, "host1", near[0], far[0])
    speaking = socket.socketpair(), socket.socketpair()
    fine = Peer(2, "host2", speaking[0][0], speaking[1][0])
    other = Watch([Peer(0, "host0", speaking[0][1], speaking[1][1])], end=ends.of("2"))
    start = time.monotonic()
    Watch([silent, fine], silence_s=2.5, end=ends.of("0"))
    ends.wait(2)
    assert time.monotonic() - start > 2.4
    assert "process 1 (host1) was lost: nothing was heard of it for 2.5 s" in ends.found["0"][0]
    assert other.is_alive() or "2" in ends.found
    close(silent, fine)
    for connection in (near[1], far[1], speaking[0][1], speaking[1][1]):
        connection.close()


def test_leave_taken_is_no_loss(job: Job) -> None:
    with ThreadPoolExecutor(1) as pool:
        leaving = pool.submit(job.leader.leave, WAIT_S)
        for index, watch in job.others.items():
            watch.leave(0.0)
            job.peers[index].control.shutdown(socket.SHUT_RDWR)
        leaving.result(WAIT_S)
    assert job.ends.found == {}


def test_all_are_ready_once_each_has_said_so(job: Job) -> None:
    job.others[1].ready({"mesh": "a"})
    job.others[2].ready({"mesh": "b"})
    assert job.leader.all_ready() == {1: {"mesh": "a"}, 2: {"mesh": "b"}}
