"""The first element of every node of a packed value: what kind of value it is.

Part of the wire: numbers are added at the end, never reused. From FIRST_EXTENSION on they belong
to those who call `Codec.extend`.
"""

from __future__ import annotations

LIST = 0
TUPLE = 1
DICT = 2
SET = 3
FROZENSET = 4
TENSOR = 5
BIG_INT = 6
COMPLEX = 7
SLICE = 8
RANGE = 9
ELLIPSIS = 10
BYTEARRAY = 11
SURROGATES = 12
ORDERED_DICT = 13
TORCH_WORD = 14
DEVICE = 15
SIZE = 16
ARRAY = 17
NUMPY_SCALAR = 18
NAMED = 19
ENUM = 20
NAMED_TUPLE = 21
DATACLASS = 22
RETURN_TYPE = 23
PARTS = 24
REGISTERED = 25
PICKLED = 26

FIRST_EXTENSION = 64
END_OF_TAGS = 128
