"""Benchmarks and demo, with their tables and plots."""
