"""The agent object of torch.distributed.rpc, over a gradwire worker, and the devices it names."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import cast

import msgspec
import torch
from torch.distributed import Store  # type: ignore[attr-defined]

from gradwire.agent.peers.directory import WorkerInfo
from gradwire.compat.rpc import constants
from gradwire.compat.rpc.options import DeviceMap, TensorPipeRpcBackendOptions
from gradwire.current import ProcessValue, current_worker
from gradwire.errors import GradwireError
from gradwire.options import FOREVER
from gradwire.rpc.join import clear_default_worker, join, set_default_worker
from gradwire.rpc.worker import Worker

_CLOSE_SECONDS = 1.0
_SHORTEST_SECONDS = 1e-6
_agent: ProcessValue[RpcAgent] = ProcessValue()


def patience(timeout: float | None) -> float:
    """The seconds that a timeout of theirs means: -1 is the default, 0 means no deadline."""
    if timeout is None or timeout == constants.UNSET_RPC_TIMEOUT:
        timeout = get_rpc_timeout()
    return max(timeout, _SHORTEST_SECONDS) if timeout else FOREVER


class RpcAgent:
    """What every backend's agent derives from, and offers."""

    rpc_timeout: float = constants.DEFAULT_RPC_TIMEOUT_SEC
    get_worker_info: Callable[..., WorkerInfo]
    get_worker_infos: Callable[..., list[WorkerInfo]]
    join: Callable[..., None]
    shutdown: Callable[..., None]
    get_debug_info: Callable[..., dict[str, str]]


def _agent_slot(_: Worker) -> list[TensorPipeAgent]:
    """Of each worker, for its agent."""
    return []


class TensorPipeAgent(RpcAgent):
    """The agent of the TENSORPIPE backend. Made, it has joined."""

    def __init__(
        self,
        store: Store,
        name: str,
        worker_id: int,
        world_size: int | None,
        opts: TensorPipeRpcBackendOptions,
        reverse_device_maps: dict[str, DeviceMap] | None = None,
        devices: list[torch.device] | None = None,
    ) -> None:
        from gradwire.compat.rpc.behavior import TORCH  # it is made of what needs this module

        count = torch.cuda.device_count()
        mine = DeviceFacts(name, count, opts.device_maps, opts.devices)
        worker = join(
            name,
            worker_id,
            world_size or None,
            opts.for_worker(),
            behavior=TORCH,
            store=store,
            note=mine.to_note(),
        )
        try:
            directory = worker.directory
            notes = [directory.note(info.id) for info in directory.all()]  # by rank, as in torch
            everyone = [DeviceFacts.from_note(note) for note in notes if note] or [mine]
            check_device_maps(everyone, is_static_group=not directory.is_open)
            _greet(worker)
        except BaseException:  # an interrupt too: nobody else would close it
            worker.shutdown(graceful=worker.directory.is_open, timeout=_CLOSE_SECONDS)
            raise
        self._take(worker, opts)
        # First: a call of a peer that has joined earlier may have made one with other options.
        worker.part(_agent_slot).insert(0, self)

    def _take(self, worker: Worker, opts: TensorPipeRpcBackendOptions) -> None:
        self.worker, self._options = worker, opts
        self.rpc_timeout = opts.rpc_timeout
        self._gil_profiling = self._has_left = False

    @classmethod
    def over(cls, worker: Worker) -> TensorPipeAgent:
        """The agent of a worker that joined by other means."""
        known = worker.part(_agent_slot)
        if not known:
            made = cls.__new__(cls)
            made._take(worker, TensorPipeRpcBackendOptions())
            known.append(made)
        return known[0]

    @property
    def store(self) -> Store | None:
        """Where the workers met, until this one leaves."""
        return self.worker.store

    @property
    def is_static_group(self) -> bool:
        """Whether nobody joins or leaves."""
        return not self.worker.directory.is_open

    def get_worker_info(self, to: str | int | WorkerInfo | None = None) -> WorkerInfo:
        """The name and number of a worker; of this one without an argument."""
        directory = self.worker.directory
        return directory.me if to is None else directory.find(to)

    def get_worker_infos(self) -> list[WorkerInfo]:
        """Everyone, by number."""
        return self.worker.directory.all()

    def join(self, shutdown: bool = False, timeout: float = 0) -> None:
        """Wait until nothing is in flight: anywhere, or in an open world here."""
        let_go = (lambda: None) if self.is_static_group else self.worker.refs.abandon
        self.worker.leave(timeout or FOREVER, let_go)
        self._has_left = True

    def leaks(self) -> list[str]:
        """Which values of this worker others hold: now, or when all programs had ended."""
        return self.worker.leaks if self._has_left else self.worker.refs.leaks()

    def shutdown(self) -> None:
        """Stop now; what still waits gets an error."""
        self.worker.close(_CLOSE_SECONDS)

    def get_debug_info(self) -> dict[str, str]:
        """Counts, as text."""
        agent = self.worker.agent
        serving = agent.dispatch.user.active
        threads = self._options.num_worker_threads
        info = {
            "agent.thread_pool_size": threads,
            "agent.num_idle_threads": max(0, threads - serving),
            "agent.client_active_calls": agent.in_flight,
            "agent.server_active_calls": serving,
            "agent.server_active_async_calls": 0,
        }
        if self._gil_profiling:  # nothing here waits for the lock in other code than Python's own
            info["agent.gil_average_wait_time_us"] = 0
        return {name: str(count) for name, count in info.items()}

    get_metrics = get_debug_info

    def enable_gil_profiling(self, flag: bool) -> None:
        """Whether the debug info has the time waited for the interpreter's lock."""
        self._gil_profiling = flag

    def _get_backend_options(self) -> TensorPipeRpcBackendOptions:
        return self._options

    def _get_device_map(self, dst: WorkerInfo) -> DeviceMap:
        return self._options.device_maps.get(dst.name, {})


def _greet(worker: Worker) -> None:
    """Connect to the leader of all-gathers, as torch does: the first call may have a short time."""
    directory, seconds = worker.directory, worker.options.timeouts.connect
    leader = min(directory.all())
    if directory.is_open:
        return
    for info in directory.others() if directory.me == leader else [leader]:
        with suppress(GradwireError):  # it may have left again, without waiting for us
            worker.agent.reach(info.id, worker.agent.clock.now() + seconds)


def _is_current_rpc_agent_set() -> bool:
    return _agent.value is not None or current_worker.maybe_find() is not None


def _get_current_rpc_agent() -> RpcAgent:
    worker, agent = current_worker.maybe_find(), _agent.value
    if worker is not None:
        return TensorPipeAgent.over(worker)
    if agent is None:
        raise RuntimeError("Current RPC agent is not set! RPC has not been initialized.")
    return agent


def _set_and_start_rpc_agent(agent: RpcAgent) -> None:
    if isinstance(agent, TensorPipeAgent):
        set_default_worker(agent.worker)
    _agent.value = agent


def _reset_current_rpc_agent() -> None:
    _agent.value = None
    worker = current_worker.maybe_default()
    if worker is not None:
        clear_default_worker(cast(Worker, worker))


def get_rpc_timeout() -> float:
    """The seconds a call may take if it does not say otherwise."""
    return _get_current_rpc_agent().rpc_timeout


def _set_rpc_timeout(seconds: float) -> None:
    _get_current_rpc_agent().rpc_timeout = float(seconds)


def enable_gil_profiling(flag: bool) -> None:
    """Whether the debug info has the time waited for the interpreter's lock."""
    agent = _get_current_rpc_agent()
    if isinstance(agent, TensorPipeAgent):
        agent.enable_gil_profiling(flag)


@dataclass(frozen=True)
class DeviceFacts:
    """What one worker tells the others of its devices."""

    name: str
    count: int
    maps: dict[str, DeviceMap]
    devices: list[torch.device]

    def has(self, devices: Iterable[torch.device]) -> bool:
        """Whether these exist there."""
        return all(
            d.type == "cpu" or (d.type == "cuda" and 0 <= (d.index or 0) < self.count)
            for d in devices
        )

    def to_note(self) -> str:
        """The form in which others find it in their directory."""
        return msgspec.json.encode(self, enc_hook=str).decode()

    @classmethod
    def from_note(cls, note: str) -> DeviceFacts:
        """From what `to_note` returned on another worker."""
        return msgspec.json.decode(note, type=cls, dec_hook=lambda device, name: device(str(name)))


def check_device_maps(everyone: Sequence[DeviceFacts], *, is_static_group: bool = True) -> None:
    """ValueError if a worker names devices or workers that there are not, or one of them twice."""
    by_name = {facts.name: facts for facts in everyone}
    for facts in everyone:
        if len(set(facts.devices)) != len(facts.devices):
            raise _wrong(facts, "duplicated devices", facts.devices)
        if not facts.has(facts.devices):
            raise _wrong(facts, "devices with invalid indices", facts.devices)
        if is_static_group and not facts.maps.keys() <= by_name.keys():
            raise _wrong(facts, "invalid target node names in its device maps", list(facts.maps))
        for to, device_map in facts.maps.items():
            _check_map(facts, to, device_map, by_name.get(to))


def _check_map(facts: DeviceFacts, to: str, given: DeviceMap, target: DeviceFacts | None) -> None:
    theirs, where = list(given.values()), f"in its device map for {to}"
    if len(set(theirs)) != len(theirs):
        raise _wrong(facts, f"duplicated target devices {where}", given)
    for side, devices, owner in (("source", list(given), facts), ("target", theirs, target)):
        if owner is None:
            continue
        if owner.devices and not set(devices) <= set(owner.devices):
            raise _wrong(facts, f"unexpected {side} devices {where}", devices)
        if not owner.devices and not owner.has(devices):
            raise _wrong(facts, f"{side} devices with invalid indices {where}", devices)


def _wrong(facts: DeviceFacts, what: str, given: object) -> ValueError:
    return ValueError(f"Node {facts.name} has {what}\nit said {given}, of {facts.count} devices")
