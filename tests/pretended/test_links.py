"""Tensors on pretended devices between workers: where they arrive, and what becomes of blocks."""

from __future__ import annotations

import threading
from functools import partial

import pytest
import torch

import gradwire as gw
from gradwire import Options
from gradwire.agent.messages import OpenBlock
from gradwire.errors import BadMessage, GradwireError, UsageError
from gradwire.seeing.counters import read_counts
from gradwire.testing.cluster import cluster
from gradwire.testing.pretend import streams
from gradwire.testing.pretend.driver import PretendBlock, PretendDriver
from gradwire.testing.pretend.tensors import PretendTensor, install, put
from gradwire.transport.devices.contract import DeviceError
from gradwire.transport.devices.words import IN_USE, TAKEN, UNREAD
from tests.leftovers import eventually

install()
HERE, THERE = "pretend:0", "pretend:1"
DRIVER = PretendDriver()


def same(x):
    return x


def where(x):
    return str(x.device)


def moved(x):
    return x.to(THERE)


def fails(x):
    raise ValueError("no")


class CompletedOnceAwaited(torch.futures.Future):
    """Completed by another thread, on a stream of its own, once there is a callback."""

    def __init__(self, x):
        super().__init__()
        self.x, self.side, self.ready = x, streams.Stream(x.device), streams.Event()
        self.ready.record(streams.current_stream(x.device))

    def add_done_callback(self, callback):
        super().add_done_callback(callback)
        threading.Thread(target=self.complete).start()

    def complete(self):
        with streams.use_stream(self.side):
            self.side.wait_event(self.ready)
            self.x.record_stream(self.side)
            self.set_result(self.x * 2)


@gw.async_execution
def doubled_elsewhere(x):
    return CompletedOnceAwaited(x)


def is_unused(devices):
    outgoing, incoming = devices._outgoing.values(), devices._incoming.values()
    return not any([lane._busy for lane in outgoing] + [lane.busy for lane in incoming])


@pytest.fixture
def workers(request):
    options = Options(**getattr(request, "param", {}))
    exposed = [same, where, moved, fails, doubled_elsewhere]
    with cluster(2, expose=exposed, options=options, drivers=lambda _: DRIVER) as made:
        yield made
        for worker in made:
            assert eventually(partial(is_unused, worker.worker.devices))  # remote() may still run
    streams.synchronize()


def lanes(worker):
    return worker.worker.devices._outgoing


def words(worker, to=1):
    lane = lanes(worker)[to]
    return [lane.words[shared.word] for shared in lane.blocks.values()]


def test_a_tensor_arrives_on_the_same_device(workers):
    x = put(torch.arange(4.0), THERE)

    got = workers[0].run(gw.rpc_sync, "w1", same, args=(x,))

    assert type(got) is PretendTensor
    assert got.device == torch.device(THERE)
    assert torch.equal(got.cpu(), torch.arange(4.0))


def test_the_tensors_of_a_message_share_a_block(workers):
    xs = [put(torch.full((n,), float(n)), HERE) for n in range(1, 6)]

    got = workers[0].run(gw.rpc_sync, "w1", same, args=(xs,))

    assert [x.cpu().tolist() for x in got] == [[float(n)] * n for n in range(1, 6)]
    assert words(workers[0]) == [TAKEN]


def test_strides_dtypes_and_empty_tensors_are_kept(workers):
    xs = [
        put(torch.arange(6).reshape(2, 3), HERE).t(),
        put(torch.ones(2, 0), HERE),
        put(torch.ones(3, dtype=torch.bfloat16), HERE)[::2],
        put(torch.tensor(True), HERE),
    ]

    got = workers[0].run(gw.rpc_sync, "w1", same, args=(xs,))

    for x, y in zip(xs, got, strict=True):
        assert (x.dtype, x.shape, y.device) == (y.dtype, y.shape, torch.device(HERE))
        assert torch.equal(x.cpu(), y.cpu())
    assert got[0].stride() == xs[0].stride()


@pytest.mark.parametrize("workers", [{"device_maps": {"w1": {HERE: THERE}}}], indirect=True)
def test_a_map_says_where_it_arrives_and_the_result_returns_by_its_inverse(workers):
    x = put(torch.ones(3), HERE).requires_grad_()

    assert workers[0].run(gw.rpc_sync, "w1", where, args=(x,)) == THERE
    y = workers[0].run(gw.rpc_sync, "w1", same, args=(x,))
    (y * 2).sum().backward()

    assert y.device == x.grad.device == torch.device(HERE)
    assert x.grad.cpu().tolist() == [2.0] * 3


@pytest.mark.parametrize(
    ("device_map", "x", "there"),
    [
        ({HERE: "cpu"}, put(torch.ones(2), HERE), "cpu"),
        ({"cpu": THERE}, torch.ones(2), THERE),
        ({HERE: THERE, THERE: HERE}, put(torch.ones(2), THERE), HERE),
    ],
)
def test_a_map_of_one_call(workers, device_map, x, there):
    x = x.detach().requires_grad_()

    def run():
        assert gw.rpc_sync("w1", where, args=(x,), device_map=device_map) == there
        y = gw.rpc_sync("w1", same, args=(x,), device_map=device_map)
        assert y.device == x.device
        (y * 3).sum().backward()
        reference = gw.remote("w1", same, args=(x,), device_map=device_map)
        assert gw.rpc_async("w1", where, args=(x,), device_map=device_map).wait() == there
        return reference

    workers[0].run(run)
    assert x.grad.device == x.device
    assert x.grad.cpu().tolist() == [3.0, 3.0]


def test_a_gradient_returns_to_the_device_of_its_tensor_from_any_other(workers):
    x = put(torch.ones(2), HERE).requires_grad_()

    y = workers[0].run(gw.rpc_sync, "w1", moved, args=(x,))
    (y * 5).sum().backward()

    assert (y.device, x.grad.device) == (torch.device(THERE), torch.device(HERE))
    assert x.grad.cpu().tolist() == [5.0, 5.0]


def test_a_map_must_be_one_to_one(workers):
    with pytest.raises(UsageError, match="two devices that arrive on the same one"):
        workers[0].run(gw.rpc_sync, "w1", same, args=(1,), device_map={HERE: THERE, THERE: THERE})


@pytest.mark.parametrize("name", ["pretend:7", "cuda:0", "nonsense:0", "pretend:0/unknown"])
def test_a_device_that_the_receiver_lacks_is_an_error_that_names_it(workers, name):
    with pytest.raises(BadMessage, match=r"does not see that device\nhint: say by Options\(device"):
        workers[0].run(
            gw.rpc_sync, "w1", same, args=(put(torch.ones(2), HERE),), device_map={HERE: name}
        ) if "/" not in name else _resolve(name)


def _resolve(name):
    from gradwire.agent.devices.arrivals import Arrivals

    Arrivals(None, lambda _: DRIVER, {})._device(name)


def test_blocks_of_a_call_that_did_not_leave_are_used_again(workers):
    x = put(torch.ones(3), HERE)
    workers[0].run(gw.rpc_sync, "w1", same, args=(x,))
    number = list(lanes(workers[0])[1].blocks)

    class Unsendable:
        pass

    for _ in range(3):
        with pytest.raises(Exception, match="cannot be serialized"):
            workers[0].run(gw.rpc_sync, "w1", same, args=([x, Unsendable()],))
    workers[0].run(gw.rpc_sync, "w1", same, args=(x,))

    assert list(lanes(workers[0])[1].blocks) == number
    assert words(workers[0]) == [TAKEN]


def test_blocks_of_a_message_that_is_dropped_unread_are_used_again(workers):
    x = put(torch.ones(3), HERE)
    workers[0].run(gw.rpc_sync, "w1", same, args=(x,))
    devices = workers[0].worker.devices
    headers, _ = devices.encode([x], 1, float("inf"))
    assert words(workers[0]) == [IN_USE]

    workers[1].worker.devices.drop(headers, 0)

    assert words(workers[0]) == [UNREAD]
    assert torch.equal(workers[0].run(gw.rpc_sync, "w1", same, args=(x,)).cpu(), torch.ones(3))


def test_a_call_that_fails_gives_its_blocks_back(workers):
    x = put(torch.ones(3), HERE)
    for _ in range(3):
        with pytest.raises(ValueError, match="no"):
            workers[0].run(gw.rpc_sync, "w1", fails, args=(x,))
    assert words(workers[0]) == [TAKEN]


def test_a_block_that_was_never_opened_is_a_bad_message(workers):
    from gradwire.wire.tensor import TensorHeader

    header = TensorHeader(11, (2,), device=HERE, block=(12345, 0))
    with pytest.raises(BadMessage, match="device block 12345, which is not mapped here"):
        workers[0].worker.devices.decode([header], None, 1)


@pytest.mark.parametrize("place", [-256, 1, 1 << 40, (1 << 20) - 256])
def test_a_place_outside_of_a_block_is_a_bad_message(workers, place):
    from msgspec.structs import replace

    x = put(torch.ones(256), HERE)
    workers[0].run(gw.rpc_sync, "w1", same, args=(x,))
    (header,), _ = workers[0].worker.devices.encode([x], 1, float("inf"))
    assert header.block is not None
    wrong = replace(header, block=(header.block[0], place))
    with pytest.raises(BadMessage, match="outside of device block"):
        workers[1].worker.devices.decode([wrong], None, 0)


def test_a_peer_that_is_lost_takes_its_lanes_along(workers):
    x = put(torch.ones(3), HERE)
    workers[0].run(gw.rpc_sync, "w1", same, args=(x,))
    workers.restart(1)

    got = workers[0].run(gw.rpc_sync, "w1", same, args=(x,))

    assert torch.equal(got.cpu(), torch.ones(3))


def test_if_the_budget_is_used_up_tensors_go_through_host_memory(caplog):
    driver = PretendDriver(budget=0)
    with cluster(2, expose=[same], drivers=lambda _: driver) as workers:
        x = put(torch.ones(3), HERE).requires_grad_()
        y = workers[0].run(gw.rpc_sync, "w1", same, args=(x,))
        y.sum().backward()

    assert y.device == x.grad.device == torch.device(HERE)
    assert x.grad.cpu().tolist() == [1.0] * 3


def test_what_is_served_on_a_users_thread_runs_on_the_default_streams(workers):
    side, seen = streams.Stream(torch.device(HERE)), []
    with streams.use_stream(side):
        workers[0].worker.agent.dispatch._run_inside(
            lambda: seen.append(streams.current_stream(HERE))
        )
        assert streams.current_stream(HERE) is side

    assert seen == [streams.default_stream(torch.device(HERE))]


@pytest.mark.parametrize("is_kept", [False, True])
def test_the_result_of_a_future_is_waited_for_on_its_own_stream(workers, is_kept):
    for seed in range(20):
        streams.shuffle(seed)
        x = put(torch.full((4,), float(seed)), HERE)
        if is_kept:
            kept = workers[0].run(gw.remote, "w1", doubled_elsewhere, args=(x,))
            got = workers[0].run(kept.to_here)
        else:
            got = workers[0].run(gw.rpc_sync, "w1", doubled_elsewhere, args=(x,))

        assert got.cpu().tolist() == [2.0 * seed] * 4


def test_a_message_that_does_not_decode_gives_its_blocks_back(workers):
    x = put(torch.ones(3), HERE)
    for _ in range(3):
        with pytest.raises(BadMessage, match="does not see that device"):
            workers[0].run(gw.rpc_sync, "w1", same, args=(x,), device_map={HERE: "pretend:7"})

    assert words(workers[0]) == [UNREAD]


def test_a_peer_may_not_use_one_word_for_two_blocks(workers):
    workers[0].run(gw.rpc_sync, "w1", same, args=(put(torch.ones(3), HERE),))
    lane = lanes(workers[0])[1]
    (block, word), page = next(iter(lane.blocks.values())), lane.words.address
    message = OpenBlock(10**6, word, "pretend", "pretended-0", block.room, block.handle, page)

    with pytest.raises(BadMessage, match="is known already, or one too many"):
        workers[1].worker.devices._incoming[0].open(message, DRIVER)


def test_what_runs_in_a_backward_belongs_to_the_worker_that_began_it(workers):
    """Torch would run it on a thread of the device, which knows neither worker nor context."""
    seen = []

    def program():
        x = put(torch.ones(2), HERE).requires_grad_()
        y = x * 2
        y.register_hook(lambda _: seen.append(gw.get_worker_info().name))
        y.sum().backward()

    workers[0].run(program)
    assert seen == ["w0"]


@pytest.mark.parametrize("method", ["begin", "fill", "filled", "begin_taking", "take"])
def test_an_error_of_the_device_ends_the_use_of_a_block(workers, method, monkeypatch):
    x = put(torch.ones(3), HERE)
    workers[0].run(gw.rpc_sync, "w1", same, args=(x,))

    def refuse(*_, **__):
        raise DeviceError("no")

    with monkeypatch.context() as patch:
        patch.setattr(PretendBlock, method, refuse)
        with pytest.raises(GradwireError, match="a tensor could not be copied"):
            workers[0].run(gw.rpc_sync, "w1", same, args=(x,))

    # The fixture looks whether a thread counts as using blocks still.
    assert workers[0].run(gw.rpc_sync, "w1", same, args=(x,)).cpu().tolist() == [1.0] * 3


def on_device(worker):
    """The bytes sent and received in device memory."""
    ((sent, received),) = [
        (each.sent, each.received)
        for each in read_counts(worker.worker).traffic
        if each.way == "device"
    ]
    return sent, received


def test_both_workers_count_the_same_bytes(workers):
    x = put(torch.ones(1000), HERE)
    workers[0].run(gw.rpc_sync, "w1", same, args=([x, x[:10]],))
    workers[0].run(gw.rpc_sync, "w1", where, args=(x,))
    sent, received = on_device(workers[0])

    assert 8040 <= sent < 9000
    assert 4040 <= received < 5000
    assert on_device(workers[1]) == (received, sent)

    workers[0].worker.agent.hang_up(1, "a test")
    assert eventually(lambda: not lanes(workers[0]) and not lanes(workers[1]))
    assert on_device(workers[0]) == (sent, received)
    assert on_device(workers[1]) == (received, sent)
