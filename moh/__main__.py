"""``python -m moh experiment=NAME``: compose, validate, freeze, train, evaluate, record."""

import os
import sys

# The hub's client warns of what the next line of ours says better.
os.environ.setdefault("HF_HUB_VERBOSITY", "error")

if __name__ == "__main__":
    try:
        from moh.cli import main

        main()
    except KeyboardInterrupt:
        print("\nmoh: stopped; the same command goes on from the last checkpoint", file=sys.stderr)
        sys.exit(130)
