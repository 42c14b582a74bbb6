"""python -m gradwire.testing.simulate: see batch.py."""

import sys

from gradwire.testing.simulate.batch import main

if __name__ == "__main__":
    sys.exit(main())
