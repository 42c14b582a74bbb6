"""Deliberate mistakes in what is shipped: the simulator finds each of them.

For each the first seed that finds it is written down, so that this is quick. All are below 1000.
"""

from __future__ import annotations

import pytest

from gradwire.agent.requests.promise import RequestTable
from gradwire.agent.serving.dispatch import Dispatch
from gradwire.autograd import engine
from gradwire.autograd.backward import coordinator
from gradwire.autograd.backward.active_pass import ActivePass
from gradwire.autograd.backward.pass_ending import PassEnding
from gradwire.autograd.backward.pass_state import PassState
from gradwire.autograd.graph.context import Forgetting
from gradwire.autograd.graph.edges import Edges
from gradwire.autograd.graph.release import Releases
from gradwire.autograd.undo.undo_log import UndoLog
from gradwire.rpc.refs import refs
from gradwire.rpc.refs.owner_state import DuplicateFilter, Owned
from gradwire.rpc.refs.state import RefTable
from tests import strength
from tests.simulate.batch import run

MUTANTS = {}


def mutant(liveness, seed):
    """Written on a function that makes the mistake with a monkeypatch."""

    def note(break_it):
        MUTANTS[break_it.__name__] = (break_it, liveness, seed)
        return break_it

    return note


@mutant(False, 0)
def an_answer_finds_no_request(patch):
    answered = RequestTable.answered

    def sometimes(self, n, by=None):
        pending = answered(self, n, by)
        return None if n % 8 == 5 else pending

    patch.setattr(RequestTable, "answered", sometimes)


@mutant(False, 0)
def an_edge_is_left_out_of_a_pass(patch):
    union = coordinator.union

    def without_one(lineages):
        return {chunk: edges & (edges - 1) for chunk, edges in union(lineages).items()}

    patch.setattr(coordinator, "union", without_one)


@mutant(False, 0)
def a_new_incarnation_counts_from_where_the_old_one_did(patch):
    patch.setattr(engine, "first_of", lambda incarnation: 0)
    patch.setattr(refs, "first_of", lambda incarnation: 0)


@mutant(False, 40)
def requests_on_a_lost_channel_are_taken_for_delivered(patch):
    patch.setattr(RequestTable, "channel_lost", lambda self, channel: [])


@mutant(False, 12)
def the_root_does_not_wait_for_the_others(patch):
    patch.setattr(PassState, "unfinished", lambda self: [])


@mutant(False, 97)
def a_pass_goes_on_without_a_worker_that_is_lost(patch):
    patch.setattr(ActivePass, "peer_lost", lambda self, worker, error: None)


@mutant(False, 166)
def a_failed_pass_keeps_its_gradients(patch):
    patch.setattr(UndoLog, "undo", UndoLog.keep)


@mutant(False, 0)
def a_reference_ends_without_a_word(patch):
    drop = RefTable._maybe_drop

    def silent(self, held):
        drop(self, held)
        return []

    patch.setattr(RefTable, "_maybe_drop", silent)


@mutant(False, 27)
def a_fork_that_was_dropped_is_counted_again(patch):
    arrived = Owned.fork_arrived

    def again(self, ref, fork, holder, n):
        value = self.values.get(ref)
        if value is not None:
            value.requested.discard(fork)
        return arrived(self, ref, fork, holder, n)

    patch.setattr(Owned, "fork_arrived", again)
    patch.setattr(DuplicateFilter, "is_old", lambda self, holder, n: False)


@mutant(False, 50)
def what_a_lost_worker_held_stays_counted(patch):
    lost = Owned._drop_forks_of

    def kept(self, ref, worker):
        forks = dict(self.values[ref].forks)
        actions = lost(self, ref, worker)
        if ref in self.values:
            self.values[ref].forks = forks
        return actions

    patch.setattr(Owned, "_drop_forks_of", kept)


@mutant(False, 0)
def a_request_is_served_twice(patch):
    serve = Dispatch.serve

    def twice(self, source, frame, may_run, interceptor):
        if frame.kind == 0x40 and frame.request % 7 == 3:
            serve(self, source, frame, False, interceptor)
        return serve(self, source, frame, may_run, interceptor)

    patch.setattr(Dispatch, "serve", twice)


@mutant(False, 41)
def nobody_asks_the_opener_of_a_context(patch):
    patch.setattr(Forgetting, "ask", lambda self, context, tried=0: None)


@mutant(False, 11)
def a_lost_root_leaves_its_passes_behind(patch):
    patch.setattr(PassEnding, "coordinator_lost", lambda self, worker: lambda: None)


@mutant(False, 0)
def releases_are_never_heard(patch):
    patch.setattr(Releases, "heard", lambda self, edges, by: None)


@mutant(False, 229)
def a_release_that_did_not_leave_is_forgotten(patch):
    to_release = Edges.to_release

    def once(self, sender, most):
        numbers = to_release(self, sender, most)
        self.was_told(sender, numbers)
        return numbers

    patch.setattr(Edges, "to_release", once)


@mutant(False, 4)
def what_a_lost_worker_received_is_not_released(patch):
    def kept(self, peer):
        self.from_peers.pop(peer, None)
        return []

    patch.setattr(Edges, "peer_lost", kept)


@mutant(False, 6)
def an_edge_is_released_by_whoever_says_so(patch):
    def believed(self, numbers, by):
        return self._dropped(numbers)

    patch.setattr(Edges, "release", believed)


@pytest.mark.parametrize("name", strength.part_of(MUTANTS, 3))
def test_a_deliberate_mistake_is_found_within_a_thousand_seeds(name, monkeypatch):
    """By the seed that found it last, if that still does."""
    break_it, liveness, seed = MUTANTS[name]
    break_it(monkeypatch)
    seeds = (seed, *range(1000))
    summary = run(seeds, liveness=liveness, on_told=lambda told, summary: not summary.failed)

    assert summary.failed
    print(f"found by seed {summary.failed[0].setting.seed}")


def test_there_are_seventeen_and_more():
    assert len(MUTANTS) >= 17
    assert all(seed < 1000 for _, _, seed in MUTANTS.values())
