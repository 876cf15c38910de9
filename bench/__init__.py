"""Benchmarks and demo, with their tables and plots.

Benches, each a command of ``gradwire bench`` unless noted:

- ``kernels``: every kernel, against plain PyTorch and a copy.
- ``reducer``: backwards with gradwire's reducer, PyTorch's and none.
- ``hooks``: the own cost of hooks, on both DDPs, without a network.
- ``host``: the host's time in a step on a GPU, measured without one.
- ``telemetry``: the cost of measured steps.
- ``network``: steps over a slow link.
- ``nodes``: training on nodes of several ranks.
- ``anywhere``: training loops without DDP, plain and compressed.
- ``converge``: time to a target over a slow link.
- ``long_runs``: losses after trainings of a fixed length; ``gradwire bench converge --steps``.
- ``demo``: a small training with each hook; ``gradwire demo``.
- ``gpu/``: the GPU lane, ``python -m gradwire.bench.gpu``: tests, sanitizer and benches that need a GPU.

Helpers:

- To start ranks: ``launch``, ``namespaces`` (hosts with a slow link), ``late_packets`` (a link with a delay).
- To train and time: ``implementations``, ``hook_step``, ``gradient_checks``, ``tasks``, ``loops``, ``models``,
  ``shapes``, ``kernel_cases``, ``kernel_bytes``, ``emulated`` (a link on one GPU), ``host_double`` (a GPU that does
  nothing), ``timing``.
- To predict: ``scale`` (many nodes; ``nodes`` prints it).
- To report: ``record``, ``tables``, ``plots``.
"""
