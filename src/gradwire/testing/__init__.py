"""How to test code that uses gradwire, and gradwire itself."""

from gradwire.testing.cluster import Cluster, Member, cluster
from gradwire.testing.generators import drawing_from, generators

__all__ = ["Cluster", "Member", "cluster", "drawing_from", "generators"]
