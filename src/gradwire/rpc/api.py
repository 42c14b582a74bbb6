"""The public functions: init_rpc and shutdown, rpc_sync, rpc_async and remote.

Below them are the checks of their arguments, and the translation of the options that torch's
`init_rpc` takes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from numbers import Integral
from typing import Any, TypeVar, cast, overload

from msgspec.structs import replace

from gradwire.agent.devices.maps import checked_map
from gradwire.agent.peers.directory import WorkerInfo
from gradwire.current import current_worker
from gradwire.errors import ArgumentTypeError, PeerLost, UsageError
from gradwire.ids import WorkerId
from gradwire.options import (
    DEFAULT,
    FOREVER,
    Options,
    Timeout,
    Timeouts,
    place_from_environment,
    rank_and_size_from_environment,
)
from gradwire.rpc.actors.names import check_name, name_value
from gradwire.rpc.calls.client import Make, Target
from gradwire.rpc.calls.futures import Future
from gradwire.rpc.codec.encoded_once import EncodedOnce
from gradwire.rpc.expose.registry import name_of
from gradwire.rpc.groups.several import (
    KINDS,
    CallToAll,
    Several,
    To,
    call_each,
    keep_on_each,
    numbers_of,
    values_of,
)
from gradwire.rpc.join import clear_default_worker, join, last_left, set_default_worker
from gradwire.rpc.retry import can_repeat
from gradwire.rpc.rref import RRef
from gradwire.rpc.worker import Exposed, Worker
from gradwire.threads import FORKED

T = TypeVar("T")
Names = Callable[[int], str]
"""The name of the worker of each rank."""

_log = logging.getLogger("gradwire")
_TEXT = (str, bytes, bytearray, memoryview)
_BACKENDS = ("TENSORPIPE", None)


def init_rpc(
    name: str | None = None,
    rank: int | None = None,
    world_size: int | None = None,
    options: Options | None = None,
    *,
    expose: Exposed = (),
    names: Names | None = None,
    backend: object = None,
    rpc_backend_options: object = None,
) -> None:
    """Make this process a worker, and wait until all `world_size` workers have joined.

    Rank and world size default to the place that a launcher gave this process (torchrun, srun,
    Kubernetes, or the variables RANK and WORLD_SIZE). If neither gives a world size, or with
    `Options(is_open=True)`, the world is open: workers come and go, and this one joins those that
    are there. The name defaults to `names(rank)`, and that to w0, w1, and so on. `expose` lists the
    modules, functions and classes that peers may run here, besides those of the `__main__` script,
    those decorated with `@gradwire.expose`, and torch's own operators.

    `backend` and `rpc_backend_options` are those of torch.distributed.rpc, for programs that are
    ported: init_method, rpc_timeout and num_worker_threads are used.
    """
    if current_worker.is_forked and current_worker.maybe_default() is not None:
        raise UsageError(FORKED, hint="start processes that are to be workers by spawn")
    if current_worker.maybe_default() is not None:
        raise UsageError("RPC is already initialized", hint="call shutdown() first")
    options = options_for(backend, rpc_backend_options, options)
    known_rank, known_size = known_rank_and_size()
    if rank is None or rank == -1:  # torch's default
        rank = known_rank
    elif not isinstance(rank, Integral):
        raise UsageError(
            f"init_rpc was given rank={rank!r:.80}, which is not a number",
            hint="it is init_rpc(name, rank, world_size, options); torch's second argument, the "
            "backend, may be given as backend=…",
        )
    if world_size is None and not options.is_open:
        world_size = known_size
    if rank is None:
        raise UsageError(
            f"init_rpc({'' if name is None else repr(name)}) does not know its rank",
            hint="pass rank=…, or set RANK as torchrun does",
        )
    if name is None:
        name = (names or default_name)(rank)
    if world_size is not None and options.is_open:
        raise UsageError(
            f"an open world has no world_size, but {name} was given {world_size}",
            hint="leave world_size out, or Options(is_open=True)",
        )
    set_default_worker(join(name, rank, world_size, options, expose=expose))


def shutdown(graceful: bool = True, timeout: float | None = None) -> None:
    """Leave the world. If graceful, serve until all workers leave and nothing is in flight.

    `timeout` begins when every worker has called this or is lost. DeadlinePassed names workers that
    did not leave in time; lost workers are logged. In an open world this worker leaves alone: it
    waits for what is in flight here, and tells the others. In a process that was forked from a
    worker this does nothing.
    """
    worker: Worker | None = current_worker.maybe_default()
    if worker is None:
        raise UsageError(
            "RPC has not been initialized. Call init_rpc first.",
            hint="shutdown() ends the worker that init_rpc() started in this process",
        )
    try:
        gave_up = worker.shutdown(graceful=graceful, timeout=timeout)
    finally:  # not before: functions that are still served must find their worker
        clear_default_worker(worker)
    if gave_up:
        _log.warning("%s shut down without %s", worker.name, ", ".join(gave_up))


def get_worker_info(name: To | None = None) -> WorkerInfo:
    """The name and id of a worker; of this one without an argument."""
    directory = _here().directory
    return directory.me if name is None else directory.find(name)


def get_worker_infos() -> list[WorkerInfo]:
    """The names and ids of all workers, this one included, by id; those present in an open world.

    A program that a launcher starts learns here how many there are.
    """
    return _here().directory.all()


def incarnation(worker: To | None = None) -> int:
    """The incarnation of a worker, as far as is known here; of this one without an argument.

    It is 0, and grows each time the worker is started again (`run(restarts=…)`). In open worlds it
    is a number that no earlier worker had.
    """
    directory = _here().directory
    return directory.incarnation(directory.me.id if worker is None else directory.number(worker))


def refusals() -> dict[str, int]:
    """How many requests and messages this worker has refused, by kind; also after its shutdown.

    For `not exposed`, `bad message` and `over limit`, the first of each kind from each peer is
    logged with the reason. `late` counts messages for a call, a pass or a context that has ended,
    `earlier incarnation` messages that a worker sent before it was started again; both are ignored.
    """
    left = last_left.value if current_worker.maybe_find() is None else None
    return (_here().refusals if left is None else left).seen()


@overload
def rpc_sync(
    to: To,
    func: Callable[..., T],
    args: tuple[object, ...] | list[Any] = (),
    kwargs: dict[str, Any] | None = None,
    timeout: Timeout = DEFAULT,
    *,
    device_map: Mapping[Any, Any] | None = None,
) -> T: ...


@overload
def rpc_sync(
    to: Several,
    func: Callable[..., T],
    args: tuple[object, ...] | list[Any] = (),
    kwargs: dict[str, Any] | None = None,
    timeout: Timeout = DEFAULT,
    *,
    device_map: Mapping[Any, Any] | None = None,
) -> list[T]: ...


def rpc_sync(
    to: To | Several,
    func: Callable[..., T],
    args: tuple[object, ...] | list[Any] = (),
    kwargs: dict[str, Any] | None = None,
    timeout: Timeout = DEFAULT,
    *,
    device_map: Mapping[Any, Any] | None = None,
) -> Any:
    """Run `func(*args, **kwargs)` on another worker and return what it returned.

    An exception of the function is raised here with its own type and the remote traceback. The call
    is part of the graph: `backward()` goes through it. The function runs at most once, unless it is
    marked `idempotent`. The call waits for `timeout` seconds, by default `Timeouts(call=…)`, and
    never longer than the call that it is made in; with None or infinity, as long as the other
    worker lives. `device_map` replaces that of `Options(device_maps=…)`, for this call.

    To a list of workers or a `group` it makes one call each, at the same time, and returns their
    results in the order of the workers. What some of them raised is an ExceptionGroup.
    """
    if type(to) is not str and isinstance(to, KINDS):
        calls = _prepared_for_all(to, func, args, kwargs, timeout, device_map)
        return values_of(calls, func)
    worker, number, target, deadline = _prepared(to, func, args, kwargs, timeout, device_map)
    while True:
        try:
            return worker.calls.call(number, target, deadline)
        except PeerLost as error:
            if not can_repeat(worker, number, func, deadline, error):
                raise
            if worker.name_to_call is not None:  # its next incarnation has to get the function
                target = replace(target, name=worker.name_to_call(func, number, deadline))


@overload
def rpc_async(
    to: To,
    func: Callable[..., T],
    args: tuple[object, ...] | list[Any] = (),
    kwargs: dict[str, Any] | None = None,
    timeout: Timeout = DEFAULT,
    *,
    device_map: Mapping[Any, Any] | None = None,
) -> Future[T]: ...


@overload
def rpc_async(
    to: Several,
    func: Callable[..., T],
    args: tuple[object, ...] | list[Any] = (),
    kwargs: dict[str, Any] | None = None,
    timeout: Timeout = DEFAULT,
    *,
    device_map: Mapping[Any, Any] | None = None,
) -> Future[list[T]]: ...


def rpc_async(
    to: To | Several,
    func: Callable[..., T],
    args: tuple[object, ...] | list[Any] = (),
    kwargs: dict[str, Any] | None = None,
    timeout: Timeout = DEFAULT,
    *,
    device_map: Mapping[Any, Any] | None = None,
) -> Any:
    """Like `rpc_sync`, but returns a future at once. The arguments are copied before it returns.

    To several workers it is one future, of the list of their results.
    """
    if type(to) is not str and isinstance(to, KINDS):
        return call_each(_prepared_for_all(to, func, args, kwargs, timeout, device_map))
    worker, number, target, deadline = _prepared(to, func, args, kwargs, timeout, device_map)
    return worker.calls.call_async(number, target, deadline)


@overload
def remote(
    to: To,
    func: Callable[..., T],
    args: tuple[object, ...] | list[Any] = (),
    kwargs: dict[str, Any] | None = None,
    timeout: Timeout = DEFAULT,
    *,
    device_map: Mapping[Any, Any] | None = None,
    name: str | None = None,
) -> RRef[T]: ...


@overload
def remote(
    to: Several,
    func: Callable[..., T],
    args: tuple[object, ...] | list[Any] = (),
    kwargs: dict[str, Any] | None = None,
    timeout: Timeout = DEFAULT,
    *,
    device_map: Mapping[Any, Any] | None = None,
) -> list[RRef[T]]: ...


def remote(
    to: To | Several,
    func: Callable[..., T],
    args: tuple[object, ...] | list[Any] = (),
    kwargs: dict[str, Any] | None = None,
    timeout: Timeout = DEFAULT,
    *,
    device_map: Mapping[Any, Any] | None = None,
    name: str | None = None,
) -> Any:
    """Run `func` on another worker, which keeps the result; return a reference to it at once.

    Using the reference raises what `func` raised. To several workers: a list of references. With a
    `name`, every worker finds the value by `lookup` as long as there is a reference to it, and this
    waits until the owner has the name.
    """
    if name is not None:
        check_name(name)
    if type(to) is not str and isinstance(to, KINDS):
        if name is not None:
            raise UsageError(f"the name {name!r} is for one value, on one worker")
        calls = _prepared_for_all(to, func, args, kwargs, timeout, device_map)
        return keep_on_each(calls, _kept)
    worker, number, target, deadline = _prepared(to, func, args, kwargs, timeout, device_map)
    rref = _kept(worker, number, target, deadline)
    if name is not None:
        name_value(name, rref, timeout=timeout)
    return rref


def _kept(worker: Worker, number: WorkerId, target: Target, deadline: float) -> RRef[Any]:
    created = worker.calls.remote(number, target, deadline)
    try:
        return cast(RRef[Any], worker.refs.make(created.handle))
    except BaseException:  # a signal handler has raised
        worker.refs.unmade(created.handle)
        raise


def call_as(
    description: str,
    make: Make[T],
    to: To,
    func: Callable[..., object],
    args: tuple[object, ...],
    kwargs: dict[str, Any],
) -> T:
    """Make a call of gradwire's own (Calls.call or call_async); errors show `description`."""
    worker = _here()
    target = Target(name_of(func), args, kwargs, description)
    return make(worker.calls, worker.directory.number(to), target, worker.deadline(DEFAULT))


def _prepared(
    to: To,
    func: Callable[..., Any],
    args: object,
    kwargs: object,
    timeout: Timeout,
    device_map: Mapping[Any, Any] | None,
) -> tuple[Worker, WorkerId, Target, float]:
    """The worker that makes a call, and what its `calls` need. hot: each call"""
    worker: Worker = current_worker.find()
    number = worker.directory.number(to)
    if not callable(func):
        raise ArgumentTypeError(
            f"function should be callable. A {type(func).__name__} is not",
            hint="pass the function itself, and its arguments as args=(...)",
        )
    if type(args) is not tuple:
        args = positional(args)
    named = {} if kwargs is None else keywords(kwargs)
    deadline = worker.deadline(timeout)
    name_to_call = worker.name_to_call
    name = name_of(func) if name_to_call is None else name_to_call(func, number, deadline)
    target = Target(name, args, named)
    if device_map is not None:
        maps = checked_map(device_map, worker.directory.name(number))
        target = replace(target, device_map=maps)
    return worker, number, target, deadline


def _prepared_for_all(
    to: Several,
    func: Callable[..., Any],
    args: object,
    kwargs: object,
    timeout: Timeout,
    device_map: Mapping[Any, Any] | None,
) -> CallToAll:
    """As `_prepared`, for the same call to several workers."""
    numbers = numbers_of(to, current_worker.find().directory)
    first = _prepared(numbers[0], func, args, kwargs, timeout, device_map)
    worker, _, target, deadline = first
    return CallToAll(worker, numbers, replace(target, encode=EncodedOnce()), deadline)


def _here() -> Worker:
    return cast(Worker, current_worker.find())


def positional(args: object) -> tuple[object, ...]:
    """The positional arguments, from a tuple or a list.

    Other iterables are refused, though `fn(*args)` would accept them: a tensor of shape (1, 3)
    would pass its row, a string its letters, a dict its keys, and none of these mistakes would
    show.
    """
    if isinstance(args, tuple | list):
        return tuple(args)
    raise _not_arguments(args)


def of_sequence(args: object) -> tuple[object, ...]:
    """The positional arguments under compat: from any sequence, or None, as in torch."""
    if args is None:
        return ()
    if isinstance(args, Sequence) and not isinstance(args, _TEXT):
        return tuple(args)
    raise _not_arguments(args)


def keywords(kwargs: object) -> dict[str, object]:
    """The keyword arguments, from a mapping or None."""
    if kwargs is None:
        return {}
    if not isinstance(kwargs, Mapping):
        raise ArgumentTypeError(
            f"kwargs is a {type(kwargs).__name__}, not a dict", hint="kwargs={'name': value}"
        )
    return dict(kwargs)


def _not_arguments(args: object) -> ArgumentTypeError:
    kind = type(args).__name__
    if isinstance(args, Mapping):
        hint = "args=(value,) passes it as one argument, kwargs=value as named ones"
    elif hasattr(args, "__iter__") and not isinstance(args, _TEXT):
        hint = "args=(value,) passes it as one argument, args=tuple(value) its elements"
    else:
        hint = "args=(value,), with the comma, passes it as one argument"
    return ArgumentTypeError(f"args is a {kind}, not a tuple or a list of arguments", hint=hint)


def default_name(rank: int) -> str:
    """w0, w1, and so on."""
    return f"w{rank}"


def known_rank_and_size() -> tuple[int | None, int | None]:
    """Rank and world size that a launcher gave this process, or that are set without one."""
    place = place_from_environment()
    return rank_and_size_from_environment() if place is None else (place.rank, place.world_size)


def options_for(backend: object, given: Any, options: Options | None) -> Options:  # noqa: ANN401
    """The options of a worker, from its own or torch's arguments of `init_rpc`."""
    name = getattr(backend, "name", backend)
    if name not in _BACKENDS:
        raise UsageError(
            f"init_rpc has no backend {name!r:.80}: there is only one",
            hint="omit backend=; Options(listen=…, tls=…) sets how workers connect",
        )
    if given is None:
        return options or Options()
    if options is not None:
        raise UsageError(
            "init_rpc takes options= or rpc_backend_options=, not both",
            hint="pass options=gradwire.Options(…) alone",
        )
    if not hasattr(given, "rpc_timeout") or not hasattr(given, "init_method"):
        raise UsageError(
            f"rpc_backend_options= takes the options of torch.distributed.rpc, not a "
            f"{type(given).__name__}",
            hint="pass options=gradwire.Options(…)",
        )
    return Options(
        init_method=given.init_method,
        device_maps=getattr(given, "device_maps", {}),
        threads=max(1, getattr(given, "num_worker_threads", Options().threads)),
        timeouts=Timeouts(call=float(given.rpc_timeout) or FOREVER),  # 0 in torch: no deadline
    )
