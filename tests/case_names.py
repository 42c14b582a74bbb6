"""Names of parametrized cases that are the same in every process."""

from __future__ import annotations

import re


def case_name(value: object) -> str:
    """Its type and repr, without addresses, and without the contents of a set."""
    shown = "" if isinstance(value, set) else re.sub(r" at 0x[0-9a-f]+", "", f"{value!a:.60}")
    return f"{type(value).__name__} {shown[:30]}".strip()
