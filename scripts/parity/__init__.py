"""Parity with the reference implementations, a module a family; run by scripts/check_parity.py."""
