"""Developers' tools: compiled kernels, a model of their times, pages from results, comparison of results."""
