from __future__ import annotations

import pytest

from gradwire.autograd.graph.context import Contexts
from gradwire.errors import ContextClosed, PeerLost
from gradwire.ids import context_id

THEIRS = context_id(1, 0)


def test_what_crosses_in_a_context_that_has_ended_is_not_recorded():
    contexts = Contexts(0, "w0")
    contexts.heard_of(THEIRS)
    contexts.close(THEIRS)

    assert contexts.heard_of(THEIRS) is None


def test_nothing_may_cross_in_a_context_whose_opener_was_lost():
    contexts = Contexts(0, "w0")
    contexts.heard_of(THEIRS)
    contexts.close(THEIRS, lost="w1")

    with pytest.raises(PeerLost, match=r"w0 has lost w1, and dropped c1\.0"):
        contexts.heard_of(THEIRS)
    with pytest.raises(ContextClosed, match="w1 was lost"):
        contexts.find(THEIRS)
