"""Benchmarks that run all contenders in one process, check their results, and only then print a speed."""
