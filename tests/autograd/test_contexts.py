from __future__ import annotations

import pytest

from gradwire.autograd.contexts import Contexts
from gradwire.errors import ContextClosed
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
    contexts.close(THEIRS, "w1 was lost: connection closed by peer")

    with pytest.raises(ContextClosed, match=r"c1\.0 was closed on w0: w1 was lost"):
        contexts.heard_of(THEIRS)
    with pytest.raises(ContextClosed, match="w1 was lost"):
        contexts.find(THEIRS)
