"""Values that stay on one process and are pointed to from others."""

from __future__ import annotations

import gc

import pytest

import gradwire
from tests.leftovers import eventually
from tests.processes import far


def test_a_reference_travels_to_a_third_worker(workers):
    kept = gradwire.remote("w1", far.Kept)

    assert gradwire.rpc_sync("w2", far.owner_of, args=(kept,)) == "w1"
    assert gradwire.rpc_sync("w2", far.where_of, args=(kept,)) == "w1"
    assert kept.rpc_async().where().wait() == "w1"


def test_a_value_lives_as_long_as_any_worker_points_to_it(workers):
    kept = gradwire.remote("w1", far.Kept)
    gradwire.rpc_sync("w2", far.keep, args=(kept,))
    kept.rpc_sync().where()

    del kept
    gc.collect()
    assert gradwire.rpc_sync("w2", far.where_of_kept) == "w1"
    assert gradwire.rpc_sync("w1", far.is_alive)

    gradwire.rpc_sync("w2", far.forget)
    assert eventually(lambda: not gradwire.rpc_sync("w1", far.is_alive))


def test_a_reference_to_a_value_that_could_not_be_made_raises_why(workers):
    failed = gradwire.remote("w2", far.refuse, args=("no such thing",))

    with pytest.raises(far.Refused, match="Refused on w2: no such thing"):
        failed.to_here()


def test_a_value_of_this_process_is_used_from_another(workers):
    mine = gradwire.RRef(far.Kept())

    assert gradwire.rpc_sync("w1", far.where_of, args=(mine,)) == "w0"
