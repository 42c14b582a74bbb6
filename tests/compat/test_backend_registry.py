"""Backends by name."""

from __future__ import annotations

import copy

import pytest

from gradwire.compat.rpc import backend_registry
from gradwire.compat.rpc.backend_registry import BackendType
from gradwire.compat.rpc.options import RpcBackendOptions, TensorPipeRpcBackendOptions


@pytest.fixture
def mine():
    before = BackendType._known
    yield backend_registry.register_backend(
        "MINE",
        lambda rpc_timeout, init_method: RpcBackendOptions(rpc_timeout, init_method),
        lambda **given: given,
    )
    BackendType._known = before


def test_a_member_stays_one_when_others_are_registered(mine):
    ours = BackendType.TENSORPIPE

    assert isinstance(ours, BackendType)
    assert ours is BackendType["TENSORPIPE"] is backend_registry.BackendType.TENSORPIPE
    assert BackendType.MINE is mine
    assert [member.name for member in BackendType] == ["MINE", "TENSORPIPE"]
    assert set(BackendType.__members__) == {"MINE", "TENSORPIPE"}
    assert repr(mine) == "BackendType.MINE"
    assert (mine in BackendType, len(BackendType)) == (True, 2)


def test_one_that_is_not_there():
    with pytest.raises(KeyError):
        BackendType["NOPE"]
    with pytest.raises(AttributeError, match="no RPC backend is called NOPE"):
        _ = BackendType.NOPE
    assert not backend_registry.backend_registered("NOPE")


def test_a_name_is_taken_once(mine):
    with pytest.raises(RuntimeError, match=r"^RPC backend MINE: already registered$"):
        backend_registry.register_backend("MINE", None, None)


def test_a_member_is_copied_by_name():
    assert copy.deepcopy(BackendType.TENSORPIPE) is BackendType.TENSORPIPE


def test_handlers_are_called_with_what_was_given(mine):
    options = backend_registry.construct_rpc_backend_options(mine, 5, "file:///x")

    assert (options.rpc_timeout, options.init_method) == (5.0, "file:///x")
    assert backend_registry.init_backend(mine, name="n") == {"name": "n"}


def test_the_options_of_ours_ignore_what_they_do_not_know():
    options = backend_registry.construct_rpc_backend_options(
        BackendType.TENSORPIPE, _transports=["uv"], num_send_recv_threads=3
    )

    assert isinstance(options, TensorPipeRpcBackendOptions)
