"""How workers join, detect that a peer has failed, and shut down together.

rendezvous.py is for a closed world, open_world.py for one whose workers come and go.
Read rendezvous.py first, then heartbeat.py and shutdown.py.
"""
