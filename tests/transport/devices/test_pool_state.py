"""Which block of device memory a message gets."""

from __future__ import annotations

import pytest

from gradwire.transport.devices.pool_state import DevicePool, room_for

MIB = 1 << 20


@pytest.mark.parametrize(
    ("length", "room"),
    [
        (1, MIB),
        (MIB, MIB),
        (MIB + 1, 2 * MIB),
        (64 * MIB, 64 * MIB),
        (64 * MIB + 1, 128 * MIB),
        (1000 * MIB, 1024 * MIB),
    ],
)
def test_blocks_have_few_sizes(length, room):
    assert room_for(length) == room


def pool_of(*rooms: int, budget: int = 1 << 30) -> DevicePool:
    pool = DevicePool(budget)
    for number, room in enumerate(rooms):
        pool.added(number, room)
    return pool


def test_the_smallest_that_fits_is_chosen():
    assert pool_of(8 * MIB, 2 * MIB, 4 * MIB).choose(2 * MIB, lambda _: True) == 1


def test_of_equals_the_one_used_last_is_chosen():
    pool = pool_of(MIB, MIB)
    assert pool.choose(5, lambda _: True) == 1
    assert pool.choose(5, lambda n: n == 0) == 0
    assert pool.choose(5, lambda _: True) == 0


def test_one_in_use_is_not_chosen():
    assert pool_of(MIB).choose(5, lambda _: False) is None


def test_a_large_one_is_kept_for_large_messages_while_another_may_be_made():
    pool = pool_of(64 * MIB, budget=65 * MIB)
    assert pool.choose(MIB, lambda _: True) is None
    assert pool.choose(3 * MIB, lambda _: True) == 0  # none of 4 MiB may be made


def test_the_budget_bounds_what_is_made():
    pool = pool_of(budget=3 * MIB)
    assert pool.may_make(2 * MIB)
    pool.added(0, 2 * MIB)
    assert not pool.may_make(2 * MIB)
    assert pool.may_make(MIB)
    pool.removed(0)
    assert pool.may_make(2 * MIB)
