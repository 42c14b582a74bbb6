"""Forward: the nodes that stand where a graph crosses, and the tables that hold them.

walk.py has the order of waiting, the argument that no two workers wait for each other.
Read crossing.py first, then walk.py.
"""
