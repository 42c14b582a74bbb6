"""gradwire on Ray: each worker is an actor. Needs `pip install 'gradwire[ray]'` on every node.

seat.py is the actor of a worker, seats.py finds places for the actors, job.py is what they are
given, run.py and world.py are the two public functions. Read run.py first.
"""

from gradwire.errors import UsageError

try:
    import ray  # noqa: F401  # the other modules do so too
except ImportError as missing:
    raise UsageError(
        f"gradwire.ray needs the library ray: {missing}", hint="pip install 'gradwire[ray]'"
    ) from missing

from gradwire.ray.run import run

__all__ = ["run"]
