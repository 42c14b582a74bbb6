"""Who has which definition, without processes."""

from __future__ import annotations

from gradwire.launch.definitions_state import DefinitionsState


def added(state, digest):
    return state.add(state.next_number(), f"name of {digest!r}", digest)


def tell_all(state):
    told = state.to_tell()
    for worker, definition in told:
        definition.told.add(worker)
    return [(worker, definition.number) for worker, definition in told]


def test_each_definition_is_told_once_to_each_worker_in_order():
    state = DefinitionsState([1, 2])
    first, second = added(state, b"1"), added(state, b"2")

    assert tell_all(state) == [(1, 1), (2, 1), (1, 2), (2, 2)]
    assert tell_all(state) == []
    assert state.missing(first) == state.missing(second) == {1, 2}

    state.has(1, 1)
    assert state.missing(first) == {2}
    assert state.missing(second) == {1, 2}
    assert state.maybe_find(b"1") is first
    assert state.maybe_find(b"3") is None


def test_a_worker_that_refused_is_told_again_when_it_is_used_again():
    state = DefinitionsState([1, 2])
    only = added(state, b"1")
    tell_all(state)

    state.refused(1, 1)
    assert state.missing(only) == {2}, "nobody waits for it"
    assert tell_all(state) == []

    only.again(2)
    assert tell_all(state) == []
    only.again(1)
    assert tell_all(state) == [(1, 1)]
    assert state.missing(only) == {1, 2}


def test_a_worker_that_was_restarted_gets_all_again():
    state = DefinitionsState([1, 2])
    added(state, b"1"), added(state, b"2")
    tell_all(state)
    state.has(1, 1)

    state.restarted(1)

    assert tell_all(state) == [(1, 1), (1, 2)]


def test_nobody_waits_for_a_worker_that_is_gone():
    state = DefinitionsState([1, 2])
    only = added(state, b"1")

    state.gone(1)

    assert tell_all(state) == [(2, 1)]
    assert state.missing(only) == {2}


def test_those_not_used_for_longest_are_forgotten():
    state = DefinitionsState([1])
    first, second, third = (added(state, bytes([n])) for n in range(3))
    state.maybe_find(first.digest)

    assert state.forget_all_but(3) == []
    assert state.forget_all_but(1) == [second, third]
    assert state.holds(first)
    assert not state.holds(second)
    state.has(1, second.number)
    assert second.had == set(), "an answer that came late"
