"""How workers find each other, notice that one is gone, and leave together.

rendezvous.py is for a closed world, open_world.py for one whose workers come and go.
Read rendezvous.py first, then heartbeat.py and shutdown.py.
"""
