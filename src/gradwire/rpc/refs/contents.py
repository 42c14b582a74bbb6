"""What is behind a reference."""

from __future__ import annotations

from typing import NamedTuple

from gradwire.agent.messages import Failure


class Value(NamedTuple):
    """What a reference points to."""

    value: object


class Raised(NamedTuple):
    """What the function that should have made the value raised instead.

    As data: an exception would hold the frames it was raised in, and all their values.
    """

    failure: Failure


Content = Value | Raised
