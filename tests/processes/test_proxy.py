"""What a network does to the bytes between two processes: an exact gradient, or an error."""

from __future__ import annotations

import time

import pytest
import torch

import gradwire
from gradwire import CallTimeout, GradwireError, Options, PeerLost, Timeouts
from gradwire.autograd.messages import Gradients, Start
from gradwire.errors import UsageError
from gradwire.rpc.messages import Call, Result
from tests.injection.proxy import HARMS, FaultProxy, Way, proxied
from tests.leftovers import eventually
from tests.processes import far

TIMEOUTS = Timeouts(join=60, connect=3, call=2, backward=2, step=2, shutdown=10, stall=1)
SLACK = 15.0  # a machine that is busy is not a fault of ours
SAID = ("PeerLost", "CallTimeout", "BackwardTimeout", "BadMessage", "RemoteError")
KINDS = {"Call": Call, "Result": Result, "Start": Start, "Gradients": Gradients}
SIZES = {"small": 3, "large": 40_000}
HARMED = [(what, "small") for what in HARMS]
HARMED += [(what, "large") for what in ("flip", "truncate", "duplicate")]


@pytest.fixture
def proxy(hosts, tmp_path):
    """w0 here, w1 on a host, and a proxy between them; tensors have checksums too."""
    options = Options(
        init_method=f"file://{tmp_path}/meeting",
        listen="tcp://127.0.0.1:0",
        timeouts=TIMEOUTS,
        checksum=True,
    )
    (host,) = hosts.take(1)
    host.begin(_join, options)
    gradwire.init_rpc("w0", 0, 2, options, expose=[far])
    try:
        with proxied("w1", seed=1) as proxy:
            yield proxy
        far.forget()
        host.finish()
    finally:
        gradwire.shutdown(graceful=False)
        host.do(_leave)


def _join(options):
    """In a process of its own: what w1 does from then on it does when asked."""
    gradwire.init_rpc("w1", 1, 2, options, expose=[far])


def _leave():
    gradwire.shutdown(graceful=False)


def _gradient(size=3):
    """Of the sum of the cubes of 1, 2, 3 …, computed by w1."""
    x = torch.arange(1, size + 1, dtype=torch.float64).requires_grad_()
    with gradwire.context():
        y = gradwire.rpc_sync("w1", far.cubed, args=(x,))
        y.sum().backward()
    return x


def _is_exact(size=3):
    x = _gradient(size)
    return torch.equal(x.grad, 3 * x.detach() ** 2)


def _contexts():
    return len(gradwire.rpc.api._here().engine.contexts)


def test_a_proxy_that_does_nothing_is_not_noticed(proxy):
    assert _is_exact()
    assert _is_exact(SIZES["large"])
    assert proxy.passed[Way.THERE] > 8 * SIZES["large"] < proxy.passed[Way.BACK]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("what", "size"), HARMED)
def test_a_harmed_frame_ends_in_an_error_that_names_the_peer_or_an_exact_gradient(
    proxy, what, kind, size
):
    assert _is_exact()
    proxy.harm(what, KINDS[kind])
    began = time.monotonic()

    said = _outcome(SIZES[size])

    assert said == "exact" or ("w1" in said and said.startswith(SAID))
    assert time.monotonic() - began < TIMEOUTS.backward + SLACK
    assert proxy.fired() == 1
    if what == "flip":
        assert "exact" not in said
    proxy.heal()
    assert eventually(lambda: _contexts() == 0)
    assert eventually(_works_again, SLACK)
    assert _is_exact(SIZES[size])


def _outcome(size):
    try:
        return "exact" if _is_exact(size) else "a wrong gradient"
    except GradwireError as error:
        kind = next(kind for kind in type(error).__mro__ if kind.__module__ == "gradwire.errors")
        return f"{kind.__name__}: {error}"


def _works_again():
    """A stalled connection may still be there, and fail the next that uses it too."""
    try:
        return _is_exact()
    except GradwireError:
        return False


def test_pieces_of_one_byte_change_nothing(proxy):
    proxy.slice(1)

    assert _is_exact()


def test_a_slow_link_is_slow_and_exact(proxy):
    proxy.slow(4e6)

    assert _is_exact(SIZES["large"])


def test_a_call_that_is_too_large_for_its_deadline_ends_by_it(proxy):
    """What is left of it goes on, behind it: the connection is as good as before."""
    assert _is_exact()
    proxy.slow(1e6)
    began = time.monotonic()

    with pytest.raises(CallTimeout, match=r"w1 did not answer w0#\d+"):
        gradwire.rpc_sync("w1", far.cubed, args=(torch.ones(5_000_000).double(),), timeout=0.5)

    assert time.monotonic() - began < 0.5 + SLACK
    proxy.heal()
    assert _is_exact()


@pytest.mark.parametrize("way", [*Way, None], ids=str)
def test_a_stalled_link_ends_by_the_deadline_and_names_the_peer(proxy, way):
    assert _is_exact()
    began = time.monotonic()
    proxy.stall(way)

    with pytest.raises((CallTimeout, PeerLost), match="w1"):
        gradwire.rpc_sync("w1", far.here, timeout=0.5)

    assert time.monotonic() - began < 0.5 + SLACK
    proxy.heal()
    assert eventually(_works_again, SLACK)


def test_a_context_is_left_in_time_though_nobody_hears_of_it(proxy):
    """The connection is given up, and who dials again gets no answer: telling must not wait."""
    with gradwire.context():
        gradwire.rpc_sync("w1", far.cubed, args=(torch.ones(1),))
        proxy.stall()
        proxy.cut()
        left = time.monotonic()

    assert time.monotonic() - left < TIMEOUTS.connect
    proxy.heal()


@pytest.mark.parametrize("how", ["cut", "reset"])
def test_the_end_of_a_connection_fails_what_waits_at_once(proxy, how):
    waiting = gradwire.rpc_async("w1", far.block, timeout=60)
    assert gradwire.rpc_sync("w1", far.here) == "w1"
    began = time.monotonic()

    getattr(proxy, how)()

    with pytest.raises(PeerLost, match=r"w1 was lost before answering w0#\d+ \(.*block\)"):
        waiting.wait()
    assert time.monotonic() - began < SLACK
    assert _is_exact()


def test_what_no_proxy_can_do_is_refused():
    with pytest.raises(UsageError, match="a proxy speaks tcp, not unix:///there"):
        FaultProxy("unix:///there")
    with pytest.raises(UsageError, match="a proxy cannot 'melt' a frame"):
        FaultProxy("tcp://127.0.0.1:1").harm("melt")
