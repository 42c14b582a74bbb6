"""Values to bytes and tensors, and back. Data only; pickles where both sides ask for them.

body.py is a whole message body: values, tensors, references, edges. codec.py encodes one value, by
the walk in walk.py. Read codec.py first.
"""
