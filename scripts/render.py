"""Render tables and the report from the run records: ``scripts/render.py TABLE...``."""

from __future__ import annotations

import sys

from moh.reporting.cli import main

if __name__ == "__main__":
    sys.exit(main())
