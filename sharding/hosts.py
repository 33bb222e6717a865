"""Several processes that run one model: start-up, and what process 0 tells the others.

Process 0 plans; the others make the same calls in the same order, and so every device runs the same
programs. How many processes there are, and who is who, is told by hand or found by
`jax.distributed`, where it knows the cluster.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import dataclasses
import signal
import socket
import threading
from collections.abc import Iterator
from importlib.metadata import version
from typing import Any

import jax
import numpy as np

from . import frames
from .frames import Frame
from .meeting import HostsError, gather, listen, meet, split_address
from .watch import Peer, Watch

#: In place of an address: `jax.distributed` finds it, and the processes' numbers.
AUTO = "auto"
#: Seconds that process 0 waits in the end for the others to end.
_LEAVE_S = 10.0
_ADDRESS_BYTES = 256


@dataclasses.dataclass(frozen=True)
class Hosts:
    """The processes of a job, seen from one of them.

    Attributes:
      count: how many there are.
      index: which this is.
    """

    count: int
    index: int

    @property
    def leads(self) -> bool:
        """Whether this is process 0, which plans."""
        return self.index == 0


class Team:
    """This process's ties to the others.

    Args:
      hosts: who it is.
      peers: for process 0 all others, for these process 0.
      watch: of the same.

    Attributes:
      hosts: likewise.
      watch: likewise; `watch.fail` ends all processes with a message.
      finished: numbers of objects that are no more, which the others are to be told of.
    """

    def __init__(self, hosts: Hosts, peers: list[Peer], watch: Watch) -> None:
        self.hosts = hosts
        self.watch = watch
        self._steps = [peer.steps for peer in peers]
        self.finished: collections.deque[int] = collections.deque()
        self._numbers = 0

    def new_number(self) -> int:
        """A number for one more object that frames are for."""
        self._numbers += 1
        return self._numbers

    def send(self, frame: Frame) -> None:
        """From process 0 to all others; returns at once, unless they are far behind."""
        data = frames.encode(frame)
        for connection in self._steps:
            try:
                connection.sendall(data)
            except OSError as error:
                self.fail_unless_lost(f"a process cannot be reached: {error}")

    def receive(self) -> Frame:
        """What process 0 sent next."""
        try:
            return frames.receive(self._steps[0])
        except (OSError, ValueError) as error:
            self.fail_unless_lost(f"process 0 cannot be heard: {error}")
            raise

    def fail_unless_lost(self, message: str) -> None:
        """Ends all processes; where it is that one was lost, the watch, which knows, says it."""
        threading.Event().wait(2.0)
        self.watch.fail(f"process {self.hosts.index}: {message}")

    def agree(self, facts: dict[str, str]) -> None:
        """Waits, on process 0, until all others are ready, with the same `facts` by name.

        The others say that they are ready, and do not wait. Where one differs, all end.
        """
        if not self.hosts.leads:
            self.watch.ready(facts)
            return
        for index, others in sorted(self.watch.all_ready().items()):
            for name, value in facts.items():
                if others.get(name) != value:
                    self.watch.fail(
                        f"process {index} has {name} {others.get(name)}, but process 0 {value}; "
                        "give all processes the same model and flags"
                    )

    @contextlib.contextmanager
    def whole(self) -> Iterator[None]:
        """Puts off an interruption (Ctrl-C) until the end: all processes make a call, or none."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        came: list[Any] = []
        before = signal.signal(signal.SIGINT, lambda *given: came.append(given))
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)
        if came and callable(before):
            before(*came[0])

    def leave(self) -> None:
        """Ends the ties in good order: all processes call it, the others once process 0 has."""
        self.watch.leave(_LEAVE_S if self.hosts.leads else 0.0)


def join(
    coordinator: str,
    count: int | None = None,
    index: int | None = None,
    *,
    timeout_s: float = 300.0,
    label: str = "stoker",
) -> Team:
    """Joins this process to the others of a job, JAX included; before JAX is used otherwise.

    Args:
      coordinator: `host:port` of process 0, the same for all, or `AUTO`.
      count: processes in all; found out where it is `AUTO`.
      index: which this is, from 0 on; likewise.
      timeout_s: how long to wait for the others.
      label: what messages of a lost process begin with.

    Raises:
      HostsError: the arguments do not fit, or the others are not there or do not fit.
    """
    if coordinator == AUTO:
        return _join_found(timeout_s, label)
    host, port = split_address(coordinator)
    if count is None or index is None:
        raise HostsError("a coordinator's address takes --num_processes and --process_id too")
    if not 0 <= index < count:
        raise HostsError(
            f"--process_id={index} of --num_processes={count}: numbers go from 0 to {count - 1}"
        )
    hosts = Hosts(count, index)
    if hosts.leads:
        listener = listen(host, port)
        jax_port = _free_port(listener)
        peers = gather(listener, count, _facts(), {"jax_port": jax_port}, timeout_s)
    else:
        peer, welcome = meet(host, port, index, count, _facts(), timeout_s)
        peers, jax_port = [peer], int(welcome["jax_port"])
    watch = Watch(peers, label=label)
    _abort_slowly()
    address = f"[{host}]:{jax_port}" if ":" in host else f"{host}:{jax_port}"
    _initialize(timeout_s, coordinator_address=address, num_processes=count, process_id=index)
    return Team(hosts, peers, watch)


def _join_found(timeout_s: float, label: str) -> Team:
    """The same where `jax.distributed` knows the cluster."""
    _initialize(timeout_s)
    hosts = Hosts(jax.process_count(), jax.process_index())
    # Process 0 tells where it listens through JAX itself.
    listener, text = None, b""
    if hosts.leads:
        own = _own_address()
        listener = listen(own, 0)
        text = f"{own} {listener.getsockname()[1]}".encode()
    from jax.experimental import multihost_utils

    padded = np.frombuffer(text.ljust(_ADDRESS_BYTES), np.uint8)
    told = bytes(np.asarray(multihost_utils.broadcast_one_to_all(padded)).astype(np.uint8))
    host, port = told.decode().split()
    if listener is not None:
        peers = gather(listener, hosts.count, _facts(), {}, timeout_s)
    else:
        peer, _ = meet(host, int(port), hosts.index, hosts.count, _facts(), timeout_s)
        peers = [peer]
    _abort_slowly()
    return Team(hosts, peers, Watch(peers, label=label))


def _initialize(timeout_s: float, **given: Any) -> None:
    # It would take SIGTERM for a hint that the process may soon end, and the process would stay.
    jax.config.update("jax_enable_preemption_service", False)
    try:
        jax.distributed.initialize(initialization_timeout=max(int(timeout_s), 1), **given)
    except (RuntimeError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise HostsError(
            f"jax.distributed did not start: {reason}; where it cannot find the cluster, give "
            "--coordinator=host:port, --num_processes and --process_id"
        ) from None


def _abort_slowly() -> None:
    """Makes `abort()` wait for six seconds, so that the watch can say which process was lost.

    JAX aborts a process, with a message of its own, in the moment in which process 0 goes; there is
    no public way to stop it. The handler of the signal is libc's `sleep`, which takes the signal's
    number, 6, for seconds: no Python runs in it, and then the process aborts as it would have.
    """
    libc = ctypes.CDLL(None)
    libc.signal.argtypes = (ctypes.c_int, ctypes.c_void_p)
    libc.signal(int(signal.SIGABRT), ctypes.cast(libc.sleep, ctypes.c_void_p))


def _facts() -> dict[str, str]:
    return {"stoker": version("stoker"), "jax": jax.__version__, "jaxlib": version("jaxlib")}


def _free_port(listener: socket.socket) -> int:
    """A port for JAX on the address of `listener`."""
    with socket.socket(listener.family, socket.SOCK_STREAM) as probe:
        probe.bind((listener.getsockname()[0], 0))
        return int(probe.getsockname()[1])


def _own_address() -> str:
    """An address of this machine that others reach: that of the way out, or of its own name."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # nothing is sent; the address is for documents
            return str(probe.getsockname()[0])
        except OSError:
            return socket.gethostbyname(socket.gethostname())
