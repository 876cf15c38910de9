"""Measured cases and the command line. May use every room of gradwire; nothing uses it."""
