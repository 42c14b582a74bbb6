"""Who is asked, suspected and given up, on a clock that the test moves."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradwire import Timeouts, UsageError
from gradwire.agent.membership.heartbeat_state import FailureDetector

LIMITS = (5.0, 15.0)  # suspect, dead


class Watch:
    """A failure detector and the links it looks at, each with its sign."""

    def __init__(self, *links: str) -> None:
        self.detector: FailureDetector[str] = FailureDetector(*LIMITS)
        self.signs: dict[str, int | None] = dict.fromkeys(links, 0)
        self.now = 100.0
        self.asked: list[tuple[float, str]] = []
        self.story: list[tuple[float, str, str]] = []
        self.look()

    def look(self) -> None:
        found = self.detector.look(self.now, self.signs)
        self.asked += [(self.now, link) for link in found.ping]
        for what in ("suspect", "back", "dead"):
            self.story += [(self.now, what, link) for link in getattr(found, what)]
        for link in found.dead:
            del self.signs[link]

    def wait(self, seconds: float) -> None:
        """Look whenever a look is due, for so long."""
        until = self.now + seconds
        while (due := self.detector.next_look()) is not None and due <= until:
            self.now = due
            self.look()
        self.now = until

    def hear(self, link: str) -> None:
        self.signs[link] += 1


def test_a_silent_link_is_asked_then_suspect_then_dead():
    watch = Watch("a")

    watch.wait(60)

    assert watch.asked[0] == (103.0, "a")
    assert watch.story == [(105.0, "suspect", "a"), (115.0, "dead", "a")]
    assert watch.detector.next_look() is None


def test_traffic_is_not_added_to():
    watch = Watch("a", "b")

    for _ in range(100):
        watch.wait(1)
        watch.hear("a")
        watch.hear("b")

    assert watch.asked == watch.story == []


def test_whoever_answers_when_asked_lives_for_ever():
    watch = Watch("a")

    for _ in range(200):
        before = len(watch.asked)
        watch.wait(1)
        if len(watch.asked) > before:
            watch.hear("a")

    assert watch.story == []
    assert 40 <= len(watch.asked) <= 70


def test_a_suspect_that_is_heard_is_back():
    watch = Watch("a", "b")
    watch.wait(7)
    assert watch.detector.silence("a", watch.now) == 7.0

    watch.hear("a")
    watch.wait(3)

    assert (108.0, "back", "a") in watch.story
    assert watch.detector.silence("a", watch.now) == 0.0
    assert watch.detector.silence("b", watch.now) == 10.0
    assert watch.detector.silence("nobody", watch.now) == 0.0


def test_silence_that_the_transport_watches_itself_does_not_count():
    watch = Watch("a")
    watch.signs["a"] = None

    watch.wait(100)
    assert watch.asked == watch.story == []

    watch.signs["a"] = 0
    watch.wait(1)
    watch.wait(16)
    assert watch.story[-1][1:] == ("dead", "a")


def test_a_link_that_ended_is_forgotten():
    watch = Watch("a")
    watch.wait(7)

    del watch.signs["a"]
    watch.wait(60)

    assert watch.story == [(105.0, "suspect", "a")]
    assert watch.detector.next_look() is None


@pytest.mark.parametrize("silence", [0, 2, 4, 8, 14])
@pytest.mark.parametrize("stopped", [2.5, 20.0, 1e6])
def test_whoever_was_stopped_itself_asks_before_it_gives_anybody_up(silence, stopped):
    watch = Watch("a", "b")
    watch.wait(silence)

    watch.now += stopped
    before = len(watch.asked)
    watch.look()

    assert not [event for event in watch.story if event[1] == "dead"]
    if silence >= 2:
        assert (watch.now, "a") in watch.asked[before:]
    for _ in range(17):
        watch.hear("a")
        watch.wait(1)
    assert [event[2] for event in watch.story if event[1] == "dead"] == ["b"]


def test_silence_is_told_as_it_is():
    watch = Watch("a")
    watch.wait(14.5)

    watch.now = 115.0
    assert watch.detector.look(watch.now, watch.signs).dead == {"a": 15.0}


@given(
    st.lists(st.floats(0.01, 40.0), max_size=60),
    st.lists(st.booleans(), max_size=60),
)
def test_nobody_is_given_up_that_was_heard_within_the_time(pauses, heard):
    detector: FailureDetector[str] = FailureDetector(*LIMITS)
    now, sign, last = 0.0, 0, 0.0
    asked_at: float | None = None
    detector.look(now, {"a": sign})
    for pause, is_heard in zip(pauses, heard, strict=False):
        now += pause
        if is_heard:
            sign, last, asked_at = sign + 1, now, None
        found = detector.look(now, {"a": sign})
        if found.dead:
            assert now - last >= LIMITS[1]
            assert asked_at is not None
            assert asked_at < now
            return
        if found.ping:
            asked_at = now


def test_a_peer_is_not_dead_before_it_is_suspect():
    with pytest.raises(UsageError, match=r"timeout dead=2 is shorter than suspect=5"):
        Timeouts(dead=2)
    assert Timeouts(suspect=0.5, dead=0.5).dead == 0.5
