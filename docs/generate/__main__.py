"""`python -m docs.generate` writes the generated pages; `--check` only says which differ."""

from __future__ import annotations

import sys

from docs.generate.pages import PAGES


def main(arguments: list[str]) -> int:
    """Write, or check; the exit status."""
    stale = [page for page in PAGES if page.is_stale()]
    for page in stale:
        print(f"{page.path.name} {'differs from the code' if arguments else 'written'}")
        if not arguments:
            page.write()
    return 1 if stale and arguments else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
