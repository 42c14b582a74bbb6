"""python -m tests.simulate: see batch.py."""

import sys

from tests.simulate.batch import main

if __name__ == "__main__":
    sys.exit(main())
