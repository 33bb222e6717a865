"""How the processes of a job find each other, before JAX does: who they are, or what is wrong."""

from __future__ import annotations

import contextlib
import errno
import socket
import time
from typing import Any

from .frames import send_text, take_text
from .watch import Peer

#: Seconds that a process which has connected may take to say who it is.
_HELLO_S = 5.0
_KINDS = ("control", "steps")
_GREETING = "stoker-hosts-1"


class HostsError(Exception):
    """The processes of a job did not find each other: one sentence, with what to do."""


def split_address(text: str) -> tuple[str, int]:
    """Host and port of `host:port`; an IPv6 address has brackets.

    Raises:
      HostsError: it is no such text.
    """
    host, _, port = text.rpartition(":")
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    digits = port.isascii() and port.isdigit()
    if not bare or not digits or not 0 < int(port) < 65536 or (":" in bare and bare == host):
        raise HostsError(f"coordinator '{text}' is no address; give host:port, as in 10.0.0.1:7000")
    return bare, int(port)


def listen(host: str, port: int) -> socket.socket:
    """A socket that waits for the others on process 0; port 0 takes any that is free.

    On the address that `host` names or, where that is none of this machine's own (behind a
    translation of addresses, say), on all of them.

    Raises:
      HostsError: the name is unknown, or the port is taken.
    """
    family, address = _resolve(host, port)
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    everywhere = ("::" if family == socket.AF_INET6 else "0.0.0.0", port)
    try:
        try:
            listener.bind(address)
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL:
                raise
            listener.bind(everywhere)
        listener.listen(256)
    except OSError as error:
        listener.close()
        raise HostsError(
            f"process 0 cannot listen on {host}:{port} ({error.strerror}); is another process 0 "
            "running, or is the port taken? give another one"
        ) from None
    return listener


def gather(
    listener: socket.socket,
    count: int,
    facts: dict[str, Any],
    welcome: dict[str, Any],
    timeout_s: float,
) -> list[Peer]:
    """On process 0: waits until all others have come, and welcomes them.

    Args:
      listener: from `listen`; closed in the end.
      count: processes in all.
      facts: what all must agree on, by name, such as versions.
      welcome: told to each of them.
      timeout_s: how long to wait.

    Raises:
      HostsError: they do not come in time, or one does not belong; all that came are told.
    """
    deadline = time.monotonic() + timeout_s
    found: dict[tuple[int, str], socket.socket] = {}
    hosts: dict[int, str] = {}
    try:
        with listener:
            while len(found) < 2 * (count - 1):
                came = _accept(listener, deadline)
                if came is None:
                    missing = [i for i in range(1, count) if (i, "steps") not in found]
                    raise HostsError(
                        f"{_numbered(missing)} of {count} did not join within {timeout_s:g} s; "
                        "start all processes, with the same --coordinator"
                    )
                connection, host, hello = came
                problem = _misfit(hello, host, count, facts, hosts, found)
                if problem is not None:
                    _refuse(connection, problem)
                    raise HostsError(problem)
                index = hello["index"]
                hosts[index] = host
                found[index, hello["kind"]] = connection
        for connection in found.values():
            send_text(connection, welcome)
    except BaseException as error:
        text = str(error) if isinstance(error, HostsError) else "process 0 ended"
        for connection in found.values():
            _refuse(connection, text)
        raise
    return [
        _peer(index, hosts[index], found[index, "control"], found[index, "steps"])
        for index in range(1, count)
    ]


def meet(
    host: str, port: int, index: int, count: int, facts: dict[str, Any], timeout_s: float
) -> tuple[Peer, dict[str, Any]]:
    """On the others: finds process 0, and waits until it has found all.

    Returns:
      Process 0, and its welcome.

    Raises:
      HostsError: it is not there, or this process does not belong.
    """
    deadline = time.monotonic() + timeout_s
    hello = {"greeting": _GREETING, "index": index, "count": count, "facts": facts}
    found: list[socket.socket] = []
    for kind in _KINDS:
        # Where the first came through, a second that does not means that process 0 has given up,
        # which the first will tell.
        try:
            connection = _connect(host, port, time.monotonic() if found else deadline)
        except OSError as error:
            if found:
                break
            raise HostsError(
                f"process 0 did not answer at {host}:{port} within {timeout_s:g} s "
                f"({error.strerror or error}); start it, and give its address to all"
            ) from None
        found.append(connection)
        with contextlib.suppress(OSError):  # likewise
            send_text(connection, {**hello, "kind": kind})
    welcome: dict[str, Any] = {}
    for connection in found:
        connection.settimeout(max(deadline - time.monotonic(), 0) + _HELLO_S)
        try:
            welcome = take_text(connection)
        except (OSError, ValueError):
            raise HostsError(
                f"process 0 at {host}:{port} ended, or is none of Stoker's, before all processes "
                "had joined; see what it printed"
            ) from None
        if "refused" in welcome:
            raise HostsError(str(welcome["refused"]))
        connection.settimeout(None)
    control, steps = found
    return _peer(0, host, control, steps), welcome


def _peer(index: int, host: str, control: socket.socket, steps: socket.socket) -> Peer:
    for connection in (control, steps):
        connection.settimeout(None)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return Peer(index, host, control, steps)


def _accept(
    listener: socket.socket, deadline: float
) -> tuple[socket.socket, str, dict[str, Any]] | None:
    """The next process that says who it is; None when the time is over. Strangers are sent off."""
    while (left := deadline - time.monotonic()) > 0:
        listener.settimeout(min(left, 0.5))  # in pieces: an interruption must get through
        try:
            connection, address = listener.accept()
        except TimeoutError:
            continue
        connection.settimeout(_HELLO_S)
        try:
            hello = take_text(connection)
        except (OSError, ValueError):
            hello = {}
        if hello.get("greeting") == _GREETING and hello.get("kind") in _KINDS:
            return connection, str(address[0]), hello
        connection.close()
    return None


def _misfit(
    hello: dict[str, Any],
    host: str,
    count: int,
    facts: dict[str, Any],
    hosts: dict[int, str],
    found: dict[tuple[int, str], socket.socket],
) -> str | None:
    """Why a process does not belong, if it does not."""
    index, told = hello.get("index"), hello.get("count")
    if told != count:
        return (
            f"process {index} ({host}) was given --num_processes={told}, but process 0 "
            f"{count}; give all processes the same number"
        )
    if not isinstance(index, int) or not 0 < index < count or (index, hello["kind"]) in found:
        others = hosts.get(index, "process 0's own") if isinstance(index, int) else "?"
        return (
            f"two processes have --process_id={index} (on {others} and {host}); give each its own, "
            f"from 0 to {count - 1}"
        )
    given = hello.get("facts")
    for name, value in facts.items():
        other = given.get(name) if isinstance(given, dict) else None
        if other != value:
            return (
                f"process {index} ({host}) has {name} {other}, but process 0 {value}; install the "
                "same everywhere"
            )
    return None


def _refuse(connection: socket.socket, problem: str) -> None:
    with contextlib.suppress(OSError):  # it may have gone
        send_text(connection, {"refused": problem})
    connection.close()


def _connect(host: str, port: int, deadline: float) -> socket.socket:
    """A connection, tried for until `deadline`, but once at least: process 0 may be starting."""
    family, address = _resolve(host, port)
    while True:
        connection = socket.socket(family, socket.SOCK_STREAM)
        connection.settimeout(min(max(deadline - time.monotonic(), _HELLO_S), 2 * _HELLO_S))
        try:
            connection.connect(address)
            return connection
        except OSError:
            connection.close()
            if time.monotonic() >= deadline:
                raise
        time.sleep(0.1)


def _resolve(host: str, port: int) -> tuple[socket.AddressFamily, Any]:
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise HostsError(
            f"coordinator host '{host}' cannot be found ({error.strerror}); give the name or "
            "address of process 0's machine"
        ) from None
    return family, address


def _numbered(missing: list[int]) -> str:
    names = ", ".join(map(str, missing))
    return f"process {names}" if len(missing) == 1 else f"processes {names}"
