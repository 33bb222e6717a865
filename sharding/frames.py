"""What processes send each other: numbers and arrays behind a fixed header, without pickle.

A frame is `code, target, value, arrays`: four bytes of length of all that follows, the header, and
each array's type, axes and bytes, little-endian. Texts travel as JSON behind their length.
"""

from __future__ import annotations

import dataclasses
import json
import socket
import struct
from typing import Any

import numpy as np

_LENGTH = struct.Struct("<I")
_HEADER = struct.Struct("<BHiH")
_ARRAY = struct.Struct("<BB")
_TYPES = tuple(np.dtype(name) for name in ("bool", "int32", "uint32", "float32", "int64", "uint8"))
#: Bytes of a text: a stranger on the port shall not make a process take memory.
LONGEST_TEXT = 1 << 20


@dataclasses.dataclass(frozen=True)
class Frame:
    """One call.

    Attributes:
      code: what to do.
      target: with which of the receiver's objects.
      value: a small number that goes with it.
      arrays: likewise.
    """

    code: int
    target: int = 0
    value: int = 0
    arrays: tuple[Any, ...] = ()


def encode(frame: Frame) -> bytes:
    """The bytes of a frame, its length first.

    Raises:
      ValueError: an array's type is none of those that travel.
    """
    pieces = [_HEADER.pack(frame.code, frame.target, frame.value, len(frame.arrays))]
    for given in frame.arrays:
        array = np.asarray(given)
        if array.dtype not in _TYPES:
            raise ValueError(f"arrays of {array.dtype} do not travel between processes")
        pieces.append(_ARRAY.pack(_TYPES.index(array.dtype), array.ndim))
        pieces.append(struct.pack(f"<{array.ndim}I", *array.shape))
        pieces.append(array.tobytes())
    body = b"".join(pieces)
    return _LENGTH.pack(len(body)) + body


def decode(body: bytes | bytearray) -> Frame:
    """The frame whose bytes, without their length, these are; its arrays lie within them.

    Raises:
      ValueError: they are no frame.
    """
    try:
        code, target, value, count = _HEADER.unpack_from(body, 0)
        at, arrays = _HEADER.size, []
        for _ in range(count):
            kind, ndim = _ARRAY.unpack_from(body, at)
            shape = struct.unpack_from(f"<{ndim}I", body, at + _ARRAY.size)
            at += _ARRAY.size + 4 * ndim
            dtype = _TYPES[kind]
            size = int(np.prod(shape, dtype=np.int64))
            arrays.append(np.frombuffer(body, dtype, size, at).reshape(shape))
            at += size * dtype.itemsize
    except (struct.error, IndexError) as error:
        raise ValueError(f"no frame: {error}") from None
    if at != len(body):
        raise ValueError(f"a frame of {len(body)} bytes ends after {at}")
    return Frame(code, target, value, tuple(arrays))


def receive(connection: socket.socket) -> Frame:
    """Waits for the next frame.

    Raises:
      ConnectionError: the other side has gone.
    """
    (length,) = _LENGTH.unpack(take(connection, _LENGTH.size))
    return decode(take(connection, length))


def take(connection: socket.socket, count: int) -> bytearray:
    """Exactly `count` bytes.

    Raises:
      ConnectionError: the other side has gone.
    """
    found = bytearray(count)
    view, got = memoryview(found), 0
    while got < count:
        fresh = connection.recv_into(view[got:])
        if not fresh:
            raise ConnectionError("the connection closed")
        got += fresh
    return found


def send_text(connection: socket.socket, content: dict[str, Any]) -> None:
    """Sends an object that `take_text` reads."""
    data = json.dumps(content).encode()
    connection.sendall(_LENGTH.pack(len(data)) + data)


def take_text(connection: socket.socket) -> dict[str, Any]:
    """The object that the other side sent.

    Raises:
      ConnectionError: the other side has gone.
      ValueError: what it sent is no such object.
    """
    (length,) = _LENGTH.unpack(take(connection, _LENGTH.size))
    if length > LONGEST_TEXT:
        raise ValueError("too long")
    content = json.loads(take(connection, length))
    if not isinstance(content, dict):
        raise ValueError("no object")
    return content
