"""Several workers at once: calls to all of a group, and what the members of a group do together.

group.py says who is meant, several.py makes the calls, and collective.py is barrier and all_gather.
"""
