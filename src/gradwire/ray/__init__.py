"""gradwire on Ray: each worker is an actor. Needs `pip install 'gradwire[ray]'` on every node.

seat.py is the actor of a worker, seats.py finds places for the actors, job.py is what they are
given, supervisor.py restarts them, and run.py and world.py have the two public functions.
"""

from gradwire.errors import UsageError

try:
    import ray  # noqa: F401  # the other modules do so too
except ImportError as missing:
    raise UsageError(
        f"gradwire.ray needs the library ray: {missing}", hint="pip install 'gradwire[ray]'"
    ) from missing

from gradwire.ray.run import run
from gradwire.ray.world import workers

__all__ = ["run", "workers"]
