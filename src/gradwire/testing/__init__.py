"""How to test code that uses gradwire, and gradwire itself."""

from gradwire.testing.cluster import Cluster, Member, cluster

__all__ = ["Cluster", "Member", "cluster"]
