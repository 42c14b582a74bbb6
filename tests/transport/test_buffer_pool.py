"""Blocks come back when their last reader is gone, and not before."""

from __future__ import annotations

import doctest
import gc
import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gradwire.transport import buffer_pool as blocks_module
from gradwire.transport.buffer_pool import SMALL_BLOCK, BlockPool, Slab, size_class


def address_of(view: memoryview) -> int:
    return torch.frombuffer(view, dtype=torch.uint8).data_ptr()


def test_a_block_is_exactly_as_long_as_asked_and_aligned():
    pool = BlockPool()
    for nbytes in (1, 63, 4096, 4097, 1_000_001):
        view = pool.take(nbytes)
        assert (len(view), view.nbytes, view.format, view.readonly) == (nbytes, nbytes, "B", False)
        assert address_of(view) % 64 == 0


def test_an_empty_block_can_be_had():
    assert len(BlockPool().take(0)) == 0


@given(st.lists(st.integers(1, SMALL_BLOCK), max_size=40))
def test_small_blocks_lie_beside_each_other_and_nobody_has_two(sizes):
    slab = Slab()
    views = [slab.take(size) for size in sizes]
    for n, view in enumerate(views):
        assert (view.nbytes, view.format, view.readonly) == (sizes[n], "B", False)
        assert address_of(view) % 64 == 0
        view[:] = bytes([n]) * sizes[n]
    assert [bytes(view) for view in views] == [bytes([n]) * size for n, size in enumerate(sizes)]


def test_a_block_is_used_again_only_after_the_last_tensor_on_it_died():
    pool = BlockPool()
    view = pool.take(10_000)
    place = address_of(view)
    tensor = torch.frombuffer(view, dtype=torch.uint8)
    part = tensor[100:200].view(torch.float32)
    del view
    assert address_of(pool.take(10_000)) != place
    del tensor
    other = pool.take(10_000)
    assert address_of(other) != place
    del part
    assert address_of(pool.take(9_999)) == place


def test_a_view_sliced_from_a_block_keeps_it_from_being_used_again():
    pool = BlockPool()
    view = pool.take(5000)
    view[:4] = b"mine"
    sliced = view[:4]
    del view
    assert pool.cached == 0
    pool.take(5000)[:4] = b"your"
    assert bytes(sliced) == b"mine"


def test_a_block_comes_back_with_the_last_slice_whoever_else_refers_to_its_memory():
    pool = BlockPool()
    view = pool.take(5000)
    sliced = view[10:20][2:4]
    references = list(pool._lent.values())  # a count of references would take these for slices
    del view
    assert pool.cached == 0
    del sliced
    assert pool.cached == size_class(5000)
    assert len(references) == 1


def test_a_block_in_a_garbage_cycle_is_let_go():
    pool = BlockPool()
    cycle: list[object] = [torch.frombuffer(pool.take(5000), dtype=torch.uint8)]
    cycle.append(cycle)
    del cycle
    gc.collect()
    assert pool.cached == size_class(5000)


def test_blocks_over_the_limit_are_freed():
    pool = BlockPool(cached_bytes=8192)
    too_large = pool.take(8193)
    del too_large
    assert pool.cached == 0
    views = [pool.take(4096) for _ in range(3)]
    del views
    assert pool.cached == 8192


def test_the_size_that_was_not_asked_for_longest_is_freed_first():
    pool = BlockPool(cached_bytes=8192 + 5120 + 100)
    old, new = pool.take(4096), pool.take(8192)
    place = address_of(new)
    del old, new
    assert pool.cached == 4096 + 8192
    newest = pool.take(5120)
    del newest
    assert pool.cached == 8192 + 5120
    assert address_of(pool.take(8192)) == place


def test_a_pool_may_die_before_its_blocks():
    view = BlockPool().take(100)
    gc.collect()
    view[:] = bytes(100)
    assert bytes(view) == bytes(100)


def test_threads_never_share_a_block():
    pool = BlockPool()
    failures = []

    def work(mark: bytes) -> None:
        for _ in range(300):
            view = pool.take(4000)
            view[:] = mark * 4000
            if bytes(view) != mark * 4000:
                failures.append(mark)

    threads = [threading.Thread(target=work, args=(bytes([n]),)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert 0 < pool.cached <= 4 * 4096


def test_the_collector_may_return_blocks_in_the_middle_of_a_take():
    pool = BlockPool()
    before = gc.get_threshold()
    gc.set_threshold(1)
    try:
        for _ in range(200):
            cycle: list[object] = [pool.take(5000)]
            cycle.append(cycle)
    finally:
        gc.set_threshold(*before)
    assert len(pool.take(5000)) == 5000


@given(st.integers(0, 1 << 40))
def test_a_size_class_holds_what_it_is_for_and_little_more(nbytes):
    size = size_class(nbytes)
    assert nbytes <= size
    assert size == 4096 or size <= nbytes * 1.25
    assert size_class(size) == size


def test_the_examples_in_the_docstrings_are_true():
    assert doctest.testmod(blocks_module).failed == 0


@pytest.mark.parametrize("nbytes", [1 << 50, 1 << 60])
def test_more_than_there_is_raises_memory_error(nbytes):
    with pytest.raises(MemoryError):
        BlockPool().take(nbytes)
