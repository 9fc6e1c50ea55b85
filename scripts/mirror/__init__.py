"""Copies of language benchmarks in the form that lm-eval's tasks read."""
