"""The ``gradwire`` command. May import every package of gradwire; no package imports it."""
