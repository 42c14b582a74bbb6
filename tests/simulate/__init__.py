"""Workers in a simulated world: one seed, one history of delays, cuts, crashes and restarts.

`simulate` runs a program of your own in it. `python -m tests.simulate --seeds 1000` runs
random programs under random faults, and checks that gradients are exact or an error says who is to
blame, that everything ends in time, and that nothing is left behind.

    scheduler     one thread at a time, chosen by the seed; the clock jumps when nobody can run
    primitives    locks, queues and threads that hand over instead of blocking, in the place of
                  Python's
    links         a transport whose frames take time, are held, repeated or lost
    world         real workers on all of that, each a process that can crash
    faults        when which fault happens
    programs      random programs, and what they give in one process
    stage         plays them and checks each step
    history       one seed from beginning to end: `play`, and `simulate`
    batch         many of them, and the command
"""

from tests.simulate.faults import Faults
from tests.simulate.history import History, Outcome, Setting, play, setting_of, simulate
from tests.simulate.scheduler import Stuck

__all__ = ["Faults", "Outcome", "Setting", "Stuck", "History", "play", "setting_of", "simulate"]
