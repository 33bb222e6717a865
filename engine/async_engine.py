"""The asyncio front of an engine: any number of tasks ask, one thread runs the steps."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import threading
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Hashable
from typing import Any

from ..models.errors import StokerError
from .engine import Engine
from .prompts import Prompt
from .replies import Delta, Reply
from .sampling_params import SamplingParams

_LOG = logging.getLogger("stoker")


class AsyncEngine:
    """Streams the replies of one engine to asyncio tasks.

    Use it as `async with AsyncEngine(engine) as front`; the engine then belongs to its thread.
    A task that leaves a stream, or is cancelled, ends its request.

    Args:
      engine: warmed up, as a rule; nobody else may call it meanwhile.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.error: BaseException | None = None
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._listeners: dict[str, _Listener] = {}
        self._closing = False
        # Held while a command is put into the queue, and while the thread stops to read it.
        self._gate = threading.Lock()
        self._ended = False
        self._thread = threading.Thread(target=self._run, name="stoker-engine", daemon=True)

    async def __aenter__(self) -> AsyncEngine:
        self._thread.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def healthy(self) -> bool:
        """The thread runs, and nothing has broken it."""
        return self._thread.is_alive() and self.error is None and not self._closing

    async def close(self) -> None:
        """Ends every request, and the thread."""
        self._order(self._close)
        await asyncio.to_thread(self._thread.join)

    async def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        salt: Hashable = None,
    ) -> AsyncIterator[Delta]:
        """What each step adds to the replies to one prompt, until all n are complete.

        A choice that fails ends with `finish_reason` "error". Arguments are those of `Engine.add`.

        Raises:
          StokerError: as `Engine.add`, before the first delta; or where the engine is closed or
            broken.
        """
        if not self.healthy:
            raise StokerError(f"the engine does not run: {self.error or 'it is closed'}")
        listener = _Listener(asyncio.get_running_loop())

        def add() -> None:
            try:
                if self._closing:
                    raise StokerError("the engine does not run: it is closed")
                reply = self.engine.add(
                    prompt, params, request_id=request_id, priority=priority, salt=salt
                )
                listener.reply = reply
                self._listeners[reply.id] = listener
                if reply.done:  # nothing had to run, so no step would tell of it
                    self._deliver(self.engine.step())
            except Exception as error:
                listener.tell([error])

        def abort() -> None:
            reply = listener.reply
            if reply is not None and self._listeners.get(reply.id) is listener:
                del self._listeners[reply.id]
                self.engine.abort(reply.id)

        if not self._order(add):
            raise StokerError(f"the engine does not run: {self.error or 'it is closed'}")
        left = 1 if params is None else params.n
        try:
            while left:
                item = await listener.items.get()
                if isinstance(item, BaseException):
                    raise item
                left -= item.finished
                yield item
        finally:
            self._order(abort)

    async def generate(self, prompt: Prompt, params: SamplingParams | None = None) -> Reply:
        """The complete reply to one prompt.

        Raises:
          StokerError: as `stream`.
        """
        async for delta in self.stream(prompt, params):
            reply = delta.reply
        return reply

    def _run(self) -> None:
        try:
            while not self._closing:
                self._obey()
                if self.engine.unfinished and not self._closing:
                    self._deliver(self.engine.step())
        except BaseException as error:
            _LOG.exception("the engine's thread broke down")
            self.error = error
        reason = StokerError(f"the engine stopped: {self.error or 'it was closed'}")
        # Whoever asks from now on is told at once, by `stream` or here.
        self._closing = True
        with self._gate:
            self._ended = True
        while not self._commands.empty():
            with contextlib.suppress(Exception):
                self._commands.get()()
        for listener in self._listeners.values():
            listener.tell([reason])

    def _order(self, command: Callable[[], None]) -> bool:
        """Gives the thread a command; False if it takes none any more."""
        with self._gate:
            if not self._ended:
                self._commands.put(command)
            return not self._ended

    def _obey(self) -> None:
        """Carries out what tasks have asked for; waits for it where there is nothing else to do."""
        if not self.engine.unfinished:
            self._commands.get()()
        while not self._commands.empty():
            self._commands.get()()

    def _deliver(self, deltas: list[Delta]) -> None:
        # One wake-up for each listener, however many choices grew.
        by_listener: dict[str, list[Any]] = defaultdict(list)
        for delta in deltas:
            by_listener[delta.reply.id].append(delta)
        for name, items in by_listener.items():
            listener = self._listeners.get(name)
            # An earlier request of the same name may have left a delta.
            items = [item for item in items if listener and item.reply is listener.reply]
            if listener and items:
                listener.tell(items)
                if items[-1].reply.done:
                    del self._listeners[name]

    def _close(self) -> None:
        self._closing = True
        for name in list(self._listeners):
            self.engine.abort(name)


class _Listener:
    """A task's mailbox, filled from the engine's thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.items: asyncio.Queue[Any] = asyncio.Queue()
        self.reply: Reply | None = None
        self._loop = loop

    def tell(self, items: list[Any]) -> None:
        """Puts items into the mailbox; a loop that has ended hears nothing."""
        try:
            self._loop.call_soon_threadsafe(self._put, items)
        except RuntimeError:
            _LOG.debug("a task's event loop has ended")

    def _put(self, items: list[Any]) -> None:
        for item in items:
            self.items.put_nowait(item)
