"""Benchmarks, demo and command line. May import every package of gradwire; no package imports it."""
