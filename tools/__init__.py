"""Developers' tools: pages from results, comparison of results, validation runs, planted defects."""
