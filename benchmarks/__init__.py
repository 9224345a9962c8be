"""Benchmarks: headwater beside what it replaces, on the same machine, the same inputs, in one run.

python -m benchmarks [SUITE ...] [--device cpu] [--json FILE]
"""
