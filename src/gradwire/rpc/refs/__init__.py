"""Reference counting over many workers: which workers hold a value, and when its owner drops it.

state.py and owner_state.py decide and are pure; refs.py performs; exchange.py sends and serves the
messages. Read state.py first.
"""
