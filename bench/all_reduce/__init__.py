"""Rooms of bench_linear_all_reduce.py: the ranks' common things, checks, candidates."""
