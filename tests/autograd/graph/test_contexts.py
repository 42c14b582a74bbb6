from __future__ import annotations

import pytest

from gradwire.errors import ContextClosed
from gradwire.ids import context_id
from tests.autograd.tables import contexts_of

THEIRS = context_id(1, 0)


def test_a_context_that_has_ended_is_not_made_again():
    contexts = contexts_of(0)
    contexts.heard_of(THEIRS)
    contexts.close(THEIRS)

    assert contexts.heard_of(THEIRS) is None


def test_a_context_whose_opener_was_lost_is_closed_and_says_why():
    contexts = contexts_of(0)
    contexts.heard_of(THEIRS)
    contexts.close(THEIRS, lost="w1")

    assert contexts.heard_of(THEIRS) is None
    assert contexts.lost_with(THEIRS) == "w1"
    with pytest.raises(ContextClosed, match="w1 was lost"):
        contexts.find(THEIRS)
