"""The exchange of one bucket, whoever owns it: buckets, hook states, memory, names, handshake, plans, telemetry.

`gradwire.hooks`, DDP, sharded models and collectives are built on it.
"""
