"""Reference counting over many workers: who holds a value, and when its owner may drop it.

state.py and owner_state.py are pure and decide; refs.py drives them; sender.py and server.py talk.
Read state.py first.
"""
