"""How to test code that uses gradwire, and gradwire itself."""

from gradwire.testing.cluster import Cluster, ClusterWorker, cluster
from gradwire.testing.generators import drawing_from, generators

__all__ = ["Cluster", "ClusterWorker", "cluster", "drawing_from", "generators"]
