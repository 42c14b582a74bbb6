"""Looking before sleeping: as long as it pays, and never on a busy machine."""

from __future__ import annotations

from gradwire.transport.sockets.stream import SPIN_SECONDS, Spin


class Time:
    """A clock that each look moves by a step."""

    def __init__(self, step: float) -> None:
        self.now, self.step = 100.0, step

    def __call__(self) -> float:
        self.now += self.step
        return self.now


def looks(spin: Spin) -> int:
    """How often it looks before it sleeps."""
    count = 1 if spin.begin() else 0
    while count and spin.should_continue():
        count += 1
    return count


def test_it_looks_for_a_bounded_time():
    time = Time(5e-6)

    assert 20 <= looks(Spin(time)) <= SPIN_SECONDS / 5e-6 + 2


def test_it_stops_at_once_when_it_was_not_running():
    time = Time(5e-6)
    spin = Spin(time)
    assert spin.begin()
    assert spin.should_continue()

    time.now += 1e-3  # somebody else had the core

    assert not spin.should_continue()
    assert not spin.begin()


def test_one_or_two_in_vain_do_not_stop_it():
    time = Time(5e-6)
    spin = Spin(time)
    for _ in range(20):
        assert looks(spin)
        assert looks(spin)
        assert spin.begin()
        spin.found()

    assert looks(spin)
    assert looks(spin)
    assert looks(spin)
    assert not spin.begin()


def test_it_rests_longer_each_time_it_was_in_vain():
    time = Time(5e-6)
    spin = Spin(time)
    assert looks(spin)
    assert looks(spin)
    rests = []
    for _ in range(8):
        assert looks(spin)
        ended = time.now
        while not spin.begin():
            time.now += 1e-3
        rests.append(time.now - ended)

    assert rests[1] > 1.5 * rests[0]
    assert max(rests) < 0.11


def test_what_it_finds_lets_it_look_again():
    time = Time(5e-6)
    spin = Spin(time)
    for _ in range(100):
        assert spin.begin()
        assert spin.should_continue()
        spin.found()
