"""The eye that processes of one job keep on each other, so that none waits for one that has gone.

Process 0 holds a connection with each of the others. Over it go a sign of life every second, and
word of failures and of the end. Whoever misses the other side, by a closed connection at once or by
its silence later, says so on standard error and ends the process from a thread of its own: the main
thread may sit in a collective that nothing else can wake.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

#: Seconds between signs of life, and of silence after which a process counts as lost.
BEAT_S, SILENCE_S = 1.0, 20.0
#: Seconds between two looks of the watch, of which there should be one every `BEAT_S`, after which
#: silence is counted anew.
STALL_S = 5.0
_HEADER = struct.Struct("<cI")
_ALIVE, _FAILED, _BYE, _READY = b"A", b"F", b"B", b"R"


@dataclasses.dataclass(frozen=True)
class Peer:
    """Another process of the job.

    Attributes:
      index: its number.
      host: where it runs, as seen from here.
      control: the connection that is watched.
      steps: the one that frames go over.
    """

    index: int
    host: str
    control: socket.socket
    steps: socket.socket

    def __str__(self) -> str:
        return f"process {self.index} ({self.host})"


def end_process(message: str, status: int) -> NoReturn:
    """Ends the process from any thread, whatever the others do.

    `os._exit`, since the usual way waits for threads, and for JAX to take leave of processes that
    may have gone.
    """
    if message:
        os.write(2, (message + "\n").encode(errors="replace"))
    os._exit(status)


class Watch(threading.Thread):
    """Watches the connections of `peers`; runs from its making on.

    Args:
      peers: for process 0 all others, for these process 0.
      label: what messages begin with.
      silence_s: of a peer, in seconds, until it counts as lost.
      end: ends the process, given a message and an exit status.
    """

    def __init__(
        self,
        peers: Sequence[Peer],
        *,
        label: str = "stoker",
        silence_s: float = SILENCE_S,
        end: Callable[[str, int], Any] = end_process,
    ) -> None:
        super().__init__(name="stoker-watch", daemon=True)
        self._peers = {peer.index: peer for peer in peers}
        self._label = label
        self._silence_s = silence_s
        self._end_process = end
        self._heard = dict.fromkeys(self._peers, time.monotonic())
        self._unread = {index: bytearray() for index in self._peers}
        self._gone: set[int] = set()
        self._ready: dict[int, dict[str, Any]] = {}
        self._changed = threading.Condition()
        self._ending, self._telling = threading.Lock(), threading.Lock()
        self._leaving = False
        self.start()

    def run(self) -> None:
        """Watches until the process ends, or all peers have taken leave."""
        with selectors.DefaultSelector() as selector:
            for peer in self._peers.values():
                selector.register(peer.control, selectors.EVENT_READ, peer)
            beat = before = time.monotonic()
            while len(self._gone) < len(self._peers):
                now = time.monotonic()
                if now - before > STALL_S:
                    # This machine stood still, and others on it may have: no silence of theirs.
                    self._heard = dict.fromkeys(self._heard, now)
                before = now
                if now >= beat:
                    self._tell(_ALIVE, {})
                    beat = now + BEAT_S
                for key, _ in selector.select(max(beat - time.monotonic(), 0)):
                    if not self._hear(key.data):
                        selector.unregister(key.fileobj)
                self._listen_for_silence()

    def ready(self, facts: dict[str, Any]) -> None:
        """Tells the peers that this process is ready, and what it made ready."""
        self._tell(_READY, facts)

    def all_ready(self) -> dict[int, dict[str, Any]]:
        """Waits until every peer is ready; returns what each told."""
        with self._changed:
            while len(self._ready) < len(self._peers):
                self._changed.wait(0.5)  # in pieces: an interruption must get through
            return dict(self._ready)

    def fail(self, message: str, status: int = 1) -> None:
        """Ends the process, after telling the peers, which then end too."""
        self._finish(f"{self._label}: {message}" if message else "", message, status)

    def fail_others(self, message: str, status: int) -> None:
        """Ends the peers with a message and an exit status; this process sees to its own end."""
        self._leaving = True
        self._tell(_FAILED, {"text": message, "status": status})

    def leave(self, timeout_s: float) -> None:
        """Takes leave: from here on peers may go; returns once all have, or after `timeout_s`."""
        self._leaving = True
        self._tell(_BYE, {})
        with self._changed:
            self._changed.wait_for(lambda: len(self._gone) == len(self._peers), timeout_s)

    def _hear(self, peer: Peer) -> bool:
        """Reads what a peer sent; whether it may send more."""
        try:
            data = peer.control.recv(65536)
        except OSError:
            data = b""
        if not data:
            self._go(peer, "its connection closed")
            return False
        self._heard[peer.index] = time.monotonic()
        unread = self._unread[peer.index]
        unread += data
        while len(unread) >= _HEADER.size:
            kind, length = _HEADER.unpack_from(unread)
            if len(unread) < _HEADER.size + length:
                break
            content = json.loads(unread[_HEADER.size : _HEADER.size + length] or b"{}")
            del unread[: _HEADER.size + length]
            self._understand(peer, kind, content)
        return True

    def _understand(self, peer: Peer, kind: bytes, content: dict[str, Any]) -> None:
        if kind == _FAILED:
            text = content["text"]
            reason = f"{self._label}: ended with the others: {text}" if text else ""
            self._finish(reason, text, content["status"])
        elif kind == _BYE:
            self._leaving = True
        elif kind == _READY:
            with self._changed:
                self._ready[peer.index] = content
                self._changed.notify_all()

    def _listen_for_silence(self) -> None:
        now = time.monotonic()
        for index, peer in self._peers.items():
            if index not in self._gone and now - self._heard[index] > self._silence_s:
                self._go(peer, f"nothing was heard of it for {self._silence_s:g} s")

    def _go(self, peer: Peer, why: str) -> None:
        if self._leaving:
            with self._changed:
                self._gone.add(peer.index)
                self._changed.notify_all()
            return
        text = f"{peer} was lost: {why}; see what it printed last, then start all processes again"
        self._finish(f"{self._label}: {text}", text, 1)

    def _finish(self, message: str, text: str, status: int) -> None:
        with self._ending:
            self._leaving = True
            self._tell(_FAILED, {"text": text, "status": status})
            self._end_process(message, status)

    def _tell(self, kind: bytes, content: dict[str, Any]) -> None:
        data = json.dumps(content).encode() if content else b""
        with self._telling:
            for index, peer in self._peers.items():
                if index not in self._gone:
                    # Where it has gone, reading tells.
                    with contextlib.suppress(OSError):
                        peer.control.sendall(_HEADER.pack(kind, len(data)) + data)
