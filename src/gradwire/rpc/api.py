"""The doors of this layer: begin and end, and run something elsewhere."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from numbers import Integral
from typing import Any, ParamSpec, TypeVar, cast

from gradwire.agent.peers.directory import WorkerInfo
from gradwire.autograd.scope import current_context
from gradwire.current import current_worker
from gradwire.errors import ArgumentTypeError, UsageError
from gradwire.options import DEFAULT, Options, Timeout, Timeouts, place_from_environment
from gradwire.rpc.calls.client import Target
from gradwire.rpc.calls.futures import Future
from gradwire.rpc.expose.registry import name_of
from gradwire.rpc.join import join, move_out, settle_here
from gradwire.rpc.retry import again_until, is_idempotent
from gradwire.rpc.rref import RRef
from gradwire.rpc.worker import Exposed, Worker

P = ParamSpec("P")
T = TypeVar("T")
To = str | int | WorkerInfo

_log = logging.getLogger("gradwire")
_TEXT = (str, bytes, bytearray, memoryview)
_BACKENDS = ("TENSORPIPE", None)
_FOR_EVER = 86400.0
"""What a timeout of 0 becomes, as under compat; in torch it means no deadline."""


def init_rpc(
    name: str,
    rank: int | None = None,
    world_size: int | None = None,
    options: Options | None = None,
    *,
    expose: Exposed = (),
    backend: object = None,
    rpc_backend_options: object = None,
) -> None:
    """Make this process a worker, and wait until all `world_size` workers have joined.

    Rank and world size default to the environment variables that torchrun sets. Without a world
    size, here and there, or with `Options(is_open=True)`, the world is open: workers come and go,
    and this one joins those that are there. `expose` names the modules, functions and classes that
    peers may run here besides those of the `__main__` script, those decorated with
    `@gradwire.expose`, and torch's own operators.

    `backend` and `rpc_backend_options` are those of torch.distributed.rpc, for programs that move
    over: init_method, rpc_timeout and num_worker_threads are taken from them.
    """
    if current_worker.maybe_default() is not None:
        raise UsageError("RPC is already initialized", hint="call shutdown() first")
    options = options_for(backend, rpc_backend_options, options)
    place = place_from_environment()
    rank = place.rank if checked_rank(rank) is None else rank
    if world_size is None and not options.is_open:
        world_size = place.world_size
    if rank is None:
        raise UsageError(
            f"init_rpc({name!r}) does not know its rank",
            hint="pass rank=…, or set RANK as torchrun does",
        )
    if world_size is not None and options.is_open:
        raise UsageError(
            f"an open world has no world_size, but {name} was given {world_size}",
            hint="leave world_size out, or Options(is_open=True)",
        )
    settle_here(join(name, rank, world_size, options, expose=expose))


def shutdown(graceful: bool = True, timeout: float | None = None) -> None:
    """Leave. Gracefully: serve until the others leave too and nothing is in flight.

    `timeout` counts from when no program is known to run any more: each worker has called this too,
    or is lost. DeadlinePassed names who did not leave in that time, a log line who was lost.
    In an open world this worker leaves alone: it waits for what is in flight here, and tells the
    others. In a process that was forked from a worker this does nothing.
    """
    worker = _default_worker()
    try:
        gave_up = worker.shutdown(graceful=graceful, timeout=timeout)
    finally:  # until then, threads of served functions must find their worker
        move_out(worker)
    if gave_up:
        _log.warning("%s shut down without %s", worker.name, ", ".join(gave_up))


def get_worker_info(name: To | None = None) -> WorkerInfo:
    """The name and number of a worker; of this one without an argument."""
    directory = _here().directory
    return directory.me if name is None else directory.find(name)


def life(worker: To | None = None) -> int:
    """In which life a worker is, as far as is known here; this one without an argument.

    It is 0 until the worker was started again (`run(restarts=…)`), and higher in each later life.
    In open worlds it is a number that no earlier worker had.
    """
    directory = _here().directory
    return directory.life(directory.me.id if worker is None else directory.number(worker))


def refusals() -> dict[str, int]:
    """What this worker has refused so far: how often, by kind.

    `not exposed`, `bad message` and `over limit` are what peers asked for and sent. The first of
    each kind from each peer is in the log, with the reason. `late` is what came for a call, a pass
    or a context that is over, `earlier life` what a worker said before it was started again: both
    are only counted, and change nothing.
    """
    return _here().refusals.seen()


def rpc_sync(
    to: To,
    func: Callable[..., T],
    args: tuple[object, ...] | list[Any] = (),
    kwargs: dict[str, Any] | None = None,
    timeout: Timeout = DEFAULT,
) -> T:
    """Run `func(*args, **kwargs)` on another worker and return what it returned.

    Raises what it raised, as its own type, with the remote traceback. Inside `context()` the call
    is part of the graph. It runs once or, if an error says so, perhaps not at all; only one that is
    marked `idempotent` is asked for again. It is waited for `timeout` seconds, by default
    `Timeouts(call=…)`, and never longer than the call that it is made in; with None or infinity, as
    long as the other worker lives.
    """
    worker: Worker = current_worker.find()
    number = worker.directory.number(to)
    target = _target(func, args, kwargs)
    deadline = worker.deadline(timeout)
    result: T
    if is_idempotent(func) and current_context() is None:
        info = worker.directory.find(to)
        call = partial(worker.calls.call, number, target, deadline)
        result = again_until(worker, info, deadline, call)
    else:
        result = worker.calls.call(number, target, deadline)
    return result


def rpc_async(
    to: To,
    func: Callable[..., T],
    args: tuple[object, ...] | list[Any] = (),
    kwargs: dict[str, Any] | None = None,
    timeout: Timeout = DEFAULT,
) -> Future[T]:
    """Like `rpc_sync`, but returns a future at once. The arguments are a snapshot."""
    worker: Worker = current_worker.find()
    number = worker.directory.number(to)
    target = _target(func, args, kwargs)
    return worker.calls.call_async(number, target, worker.deadline(timeout))


def remote(
    to: To,
    func: Callable[..., T],
    args: tuple[object, ...] | list[Any] = (),
    kwargs: dict[str, Any] | None = None,
    timeout: Timeout = DEFAULT,
) -> RRef[T]:
    """Run `func` on another worker and keep the result there; a reference to it, at once.

    What `func` raises is raised by whoever uses the reference.
    """
    worker = _here()
    number = worker.directory.number(to)
    target = _target(func, args, kwargs)
    created = worker.calls.remote(number, target, worker.deadline(timeout))
    return cast(RRef[T], worker.refs.make(created.hold))


def call_as(
    what: str, to: To, func: Callable[..., T], args: tuple[object, ...], kwargs: dict[str, Any]
) -> T:
    """`rpc_sync` for a function of gradwire's own, which errors and warnings call `what`."""
    worker = _here()
    target = Target(name_of(func), args, kwargs, what)
    result: T = worker.calls.call(worker.directory.number(to), target, worker.deadline(DEFAULT))
    return result


def call_async_as(
    what: str, to: To, func: Callable[..., T], args: tuple[object, ...], kwargs: dict[str, Any]
) -> Future[T]:
    """`rpc_async`, likewise."""
    worker = _here()
    target = Target(name_of(func), args, kwargs, what)
    return worker.calls.call_async(worker.directory.number(to), target, worker.deadline(DEFAULT))


def _target(func: Callable[..., Any], args: object, kwargs: object) -> Target:
    if not callable(func):
        raise ArgumentTypeError(
            f"function should be callable. A {type(func).__name__} is not",
            hint="pass the function itself, and its arguments as args=(...)",
        )
    if type(args) is not tuple:
        args = positional(args)
    return Target(name_of(func), args, {} if kwargs is None else keywords(kwargs))


def _here() -> Worker:
    return cast(Worker, current_worker.find())


def _default_worker() -> Worker:
    worker = current_worker.maybe_default()
    if worker is None:
        raise UsageError(
            "RPC has not been initialized. Call init_rpc first.",
            hint="shutdown() ends what init_rpc() began in this process",
        )
    return cast(Worker, worker)


def positional(args: object, what: str = "args") -> tuple[object, ...]:
    """The positional arguments, of a tuple or a list.

    hot: asked for each call.
    """
    if type(args) is tuple:
        return args
    if isinstance(args, tuple | list):
        return tuple(args)
    raise _not_arguments(args, what)


def of_sequence(args: object) -> tuple[object, ...]:
    """The same for programs of torch's, where any sequence will do, and None for no arguments."""
    if args is None:
        return ()
    if isinstance(args, Sequence) and not isinstance(args, _TEXT):
        return tuple(args)
    raise _not_arguments(args, "args")


def keywords(kwargs: object, what: str = "kwargs") -> dict[str, object]:
    """The keyword arguments, of a dict or another mapping; None for no such arguments."""
    if kwargs is None:
        return {}
    if not isinstance(kwargs, Mapping):
        raise ArgumentTypeError(
            f"{what} is a {type(kwargs).__name__}, not a dict", hint=f"{what}={{'name': value}}"
        )
    return dict(kwargs)


def _not_arguments(args: object, what: str) -> ArgumentTypeError:
    kind = type(args).__name__
    if isinstance(args, Mapping):
        hint = f"{what}=(value,) passes it as one argument, kwargs=value as named ones"
    elif hasattr(args, "__iter__") and not isinstance(args, _TEXT):
        hint = f"{what}=(value,) passes it as one argument, {what}=tuple(value) its elements"
    else:
        hint = f"{what}=(value,), with the comma, passes it as one argument"
    return ArgumentTypeError(f"{what} is a {kind}, not a tuple or a list of arguments", hint=hint)


def options_for(backend: object, given: Any, options: Options | None) -> Options:  # noqa: ANN401
    """The options of a worker that was given torch's, or ours, or none."""
    name = getattr(backend, "name", backend)
    if name not in _BACKENDS:
        raise UsageError(
            f"init_rpc has no backend {name!r:.80}: there is one, and nothing to choose",
            hint="leave backend= out; how workers reach each other is Options(listen=…, tls=…)",
        )
    if given is None:
        return options or Options()
    if options is not None:
        raise UsageError(
            "init_rpc was given options= and rpc_backend_options=, which say the same things",
            hint="pass options=gradwire.Options(…) alone",
        )
    return _translated(given)


def checked_rank(rank: object) -> int | None:
    """The rank that was given; torch's default, -1, is none."""
    if rank is None or rank == -1:
        return None
    if not isinstance(rank, Integral):
        raise UsageError(
            f"init_rpc was given rank={rank!r:.80}, which is not a number",
            hint="it is init_rpc(name, rank, world_size, options); torch's second argument, the "
            "backend, may be given as backend=…",
        )
    return int(rank)


def _translated(given: Any) -> Options:  # noqa: ANN401
    if not hasattr(given, "rpc_timeout") or not hasattr(given, "init_method"):
        raise UsageError(
            f"rpc_backend_options= takes the options of torch.distributed.rpc, not a "
            f"{type(given).__name__}",
            hint="pass options=gradwire.Options(…)",
        )
    if getattr(given, "device_maps", None):
        raise UsageError(
            "rpc_backend_options= has device maps, which native calls do not use",
            hint="a tensor arrives on the device of the same name: move it there before the call, "
            "or use RemoteModule('w1/cuda:0', …); programs under gradwire.compat keep their maps",
        )
    return Options(
        init_method=given.init_method,
        threads=max(1, getattr(given, "num_worker_threads", Options().threads)),
        timeouts=Timeouts(call=float(given.rpc_timeout) or _FOR_EVER),
    )
