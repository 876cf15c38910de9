"""`WirePolicy`: the wire format of each parameter, and the first quantised step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

import torch
from torch import Tensor

from gradwire.compress._options import check_whole_number
from gradwire.kernels import WIRE_FORMATS, WireFormat


@dataclass(frozen=True, kw_only=True)
class WirePolicy:
    """The wire format of each parameter.

    The first pattern in ``wires`` that matches a parameter's name decides. A parameter that matches a pattern in
    ``exempt``, or has fewer than two dimensions, is sent in 16 bit: fp16 for fp16 gradients, else bf16. All other
    parameters are sent in ``wire``.

    Attributes:
        wire: a format of `gradwire.kernels.WIRE_FORMATS`.
        exempt: name patterns, as in `fnmatch`.
        wires: other formats, by name pattern.
        start_iteration: the first quantised step.

    Raises:
        ValueError: an attribute is of another type, or a format is unknown.
    """

    wire: str = "int4"
    exempt: tuple[str, ...] = ("*.bias", "*norm*")
    wires: Mapping[str, str] = field(default_factory=dict)
    start_iteration: int = 2

    def __post_init__(self) -> None:
        _check_format("wire", self.wire)
        if not isinstance(self.exempt, tuple) or not all(isinstance(pattern, str) for pattern in self.exempt):
            raise ValueError(f"exempt is {self.exempt!r}; expected a tuple of name patterns, such as ('*.bias',).")
        if not isinstance(self.wires, Mapping) or not all(isinstance(pattern, str) for pattern in self.wires):
            raise ValueError(f"wires is {self.wires!r}; expected a dictionary from name patterns to wire formats.")
        for pattern, wire in self.wires.items():
            _check_format(f"wires[{pattern!r}]", wire)
        check_whole_number("start_iteration", self.start_iteration, "a whole number of steps, at least 0", 0)

    def has_started(self, iteration: int) -> bool:
        """Whether step ``iteration``, counted from 0, is quantised."""
        return iteration >= self.start_iteration

    def wire_format(self, name: str, layout: Tensor) -> WireFormat:
        """The wire format of a parameter.

        Args:
            name: of the parameter.
            layout: a tensor with its shape and the dtype of its gradient.
        """
        for pattern, wire in self.wires.items():
            if fnmatchcase(name, pattern):
                return WIRE_FORMATS[wire]
        if layout.dim() < 2 or any(fnmatchcase(name, pattern) for pattern in self.exempt):
            return WIRE_FORMATS["fp16" if layout.dtype.to_real() == torch.float16 else "bf16"]
        return WIRE_FORMATS[self.wire]

    def wire_formats(self, layouts: Sequence[Tensor], names: Sequence[str] | None = None) -> list[WireFormat]:
        """`wire_format` of every parameter; without names, patterns match "0", "1", ..."""
        names = names if names is not None else [str(i) for i in range(len(layouts))]
        return [self.wire_format(name, layout) for name, layout in zip(names, layouts, strict=True)]

    def unmatched_pattern(self, names: Iterable[str]) -> str | None:
        """The first pattern in ``wires`` that matches none of the names, as ``wires['head.*']``; None if all match.

        Patterns in ``exempt`` need not match: the default ones suit models with and without normalisation layers.
        """
        names = list(names)
        for pattern in self.wires:
            if not any(fnmatchcase(name, pattern) for name in names):
                return f"wires[{pattern!r}]"
        return None


def _check_format(option: str, value: object) -> None:
    if not isinstance(value, str) or value not in WIRE_FORMATS:
        raise ValueError(f"{option} is {value!r}; expected one of {', '.join(WIRE_FORMATS)}.")
