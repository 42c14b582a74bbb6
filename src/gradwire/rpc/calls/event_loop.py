"""The event loop of one worker, which runs the `async def` functions that peers call.

A task enters the scope and the modes of its call for each of its steps (suspended.py), as tasks
share one thread. It is cancelled with its call, and when the deadline of the call has passed.
"""

from __future__ import annotations

import asyncio
import collections.abc
import logging
import threading
from collections.abc import Callable, Coroutine
from contextlib import suppress
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, NamedTuple, final

import torch

from gradwire import threads
from gradwire.agent.serving.dispatch import Source
from gradwire.errors import Cancelled, UsageError
from gradwire.rpc.calls.suspended import Suspended
from gradwire.rpc.expose.async_execution import Later
from gradwire.rpc.messages import Call

if TYPE_CHECKING:
    from gradwire.rpc.worker import Worker

_CLOSE_SECONDS: Final = 1.0
"""for tasks that were cancelled at shutdown, and for threads that they have started"""
_LONGEST: Final = 1e6
"""seconds; an event loop cannot look further ahead"""
_log = logging.getLogger("gradwire")


class TaskEnd(NamedTuple):
    """How a task has ended. An error is a value here: torch's futures take only some of them."""

    value: object
    error: BaseException | None = None

    def result(self) -> object:
        """What the function returned; raises what it raised."""
        if self.error is not None:
            raise self.error
        return self.value


@final
class ScopedSteps(collections.abc.Coroutine[Any, Any, TaskEnd]):
    """A coroutine whose steps run in the scope of its call; its result is a TaskEnd."""

    def __init__(
        self, inner: Coroutine[Any, Any, object], scoped: Callable[[Callable[[], Any]], Any]
    ) -> None:
        self._inner, self._scoped = inner, scoped

    def send(self, value: Any) -> Any:  # noqa: ANN401
        """Run to the next await."""
        return self._step(partial(self._inner.send, value))

    def throw(  # type: ignore[override]
        self,
        kind: BaseException,
        value: BaseException | None = None,
        trace: TracebackType | None = None,
    ) -> Any:  # noqa: ANN401
        """Raise an exception at the current await, and run to the next one."""
        return self._step(partial(self._inner.throw, kind))

    def close(self) -> None:
        """End it where it is."""
        self._inner.close()

    def __await__(self) -> Any:  # noqa: ANN401
        return self

    def _step(self, go_on: Callable[[], Any]) -> Any:  # noqa: ANN401
        try:
            return self._scoped(go_on)
        except StopIteration as end:
            raise StopIteration(TaskEnd(end.value)) from None
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # not to the loop, which SystemExit would end
            raise StopIteration(TaskEnd(None, error)) from None


@final
class ServedTask:
    """The task of one call, from when its function was called. Used on the loop's thread."""

    def __init__(
        self, steps: ScopedSteps, source: Source, ended: Callable[[TaskEnd], None]
    ) -> None:
        self._steps, self._source, self._ended = steps, source, ended
        self._task: asyncio.Task[TaskEnd] | None = None
        self._why = ""

    def begin(self, loop: asyncio.AbstractEventLoop, suspended: Suspended, seconds: float) -> None:
        """Run it; it is cancelled after so many seconds."""
        task = self._task = loop.create_task(self._steps, context=suspended.variables)
        late = "the deadline of its call has passed"
        timer = None
        if seconds < _LONGEST:
            timer = loop.call_later(max(0.0, seconds), self.cancel, late)
        task.add_done_callback(partial(self._done, timer))
        if self._source.cancelled:
            self.cancel(self._source.cancelled)

    def cancel(self, why: str) -> None:
        """Raise CancelledError where it waits."""
        self._why = self._why or why
        if self._task is not None:
            self._task.cancel()

    def _done(self, timer: asyncio.TimerHandle | None, task: asyncio.Task[TaskEnd]) -> None:
        if timer is not None:
            timer.cancel()
        if task.cancelled():
            why = self._source.cancelled or self._why or "its worker has shut down"
            self._ended(TaskEnd(None, Cancelled(f"the task of a call was cancelled: {why}")))
        else:
            self._ended(task.result())


@final
class EventLoop:
    """The loop and its thread, from the first `async def` function that is called on."""

    def __init__(self, worker: Worker) -> None:
        self._worker, self._agent = worker, worker.agent
        self._name = f"gradwire {worker.name} loop"
        self._lock = threading.RLock()
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_closed = False
        self.active = 0
        """how many tasks run; changed by the thread of the loop"""

    def begin(
        self, call: Call, coroutine: Coroutine[Any, Any, object], source: Source, deadline: float
    ) -> Later:
        """Run what an `async def` function returned, in the scope of its call; its result.

        A call whose result is kept here is not cancelled, and has no deadline of its own.
        """
        loop, is_kept = self._running(), call.keep is not None
        if loop is None or call.draws is not None:
            coroutine.close()
            raise self._refusal(call)
        suspended, outlasting = Suspended(self._worker), self._agent.dispatch.outlasting
        future: torch.futures.Future[TaskEnd] = torch.futures.Future()

        def scoped(go_on: Callable[[], Any]) -> Any:  # noqa: ANN401
            with suspended.scope(deadline, source):
                return suspended.step(go_on)

        def ended(end: TaskEnd) -> None:
            self.active -= 1
            source.on_cancelled = None
            outlasting.discard(source)
            future.set_result(end)

        served = ServedTask(ScopedSteps(coroutine, scoped), source, ended)
        seconds = _LONGEST if is_kept else deadline - self._agent.clock.now()
        if not is_kept:
            source.on_cancelled = partial(self._cancel, loop, served)
            outlasting.add(source)

        def begin() -> None:
            self.active += 1
            served.begin(loop, suspended, seconds)

        loop.call_soon_threadsafe(begin)
        return Later(future, finish=TaskEnd.result)

    def _refusal(self, call: Call) -> UsageError:
        if call.draws is None:
            return UsageError(f"{self._worker.name} has shut down, and runs no more tasks")
        return UsageError(
            f"{call.function} is an async def, which an activation checkpoint cannot repeat",
            hint="call it outside of the checkpoint, or call a function that is no async def",
        )

    def _cancel(self, loop: asyncio.AbstractEventLoop, served: ServedTask, why: str) -> None:
        with suppress(RuntimeError):  # the loop was closed
            loop.call_soon_threadsafe(served.cancel, why)

    def _running(self) -> asyncio.AbstractEventLoop | None:
        if self._loop is not None and not self._is_closed:
            return self._loop
        with self._lock:
            if self._thread is None and not self._is_closed:
                self._loop = asyncio.new_event_loop()
                self._thread = threads.thread(self._name, partial(self._run, self._loop))
                self._thread.start()
        return None if self._is_closed else self._loop

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        loop.run_forever()
        try:
            loop.run_until_complete(_end_tasks())
        except Exception:
            _log.exception("%s: tasks could not be ended", self._worker.name)
        finally:
            loop.close()

    def close(self) -> None:
        """Cancel the tasks that run, and end the thread."""
        with self._lock:
            self._is_closed = True
            loop, thread = self._loop, self._thread
        if loop is None or thread is None or thread is threading.current_thread():
            return
        with suppress(RuntimeError):  # it is closed
            loop.call_soon_threadsafe(loop.stop)
        thread.join(2 * _CLOSE_SECONDS + 0.5)


async def _end_tasks() -> None:
    loop = asyncio.get_running_loop()
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks, timeout=_CLOSE_SECONDS)
    await loop.shutdown_asyncgens()
    with suppress(TimeoutError):
        await asyncio.wait_for(loop.shutdown_default_executor(), _CLOSE_SECONDS)
