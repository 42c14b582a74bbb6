"""Reference counting over many workers: which workers hold a value, and when its owner drops it.

state.py and owner_state.py decide and are pure; refs.py performs; sender.py and server.py exchange
messages. Read state.py first.
"""
