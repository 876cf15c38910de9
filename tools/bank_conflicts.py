"""Bank conflicts of a kernel in shared memory, from the addresses that one program computes.

A program's PTX is executed for all its threads: integers and predicates only, with the arguments of a recorded launch
and the contents of its int32 and int64 tensors. Floating-point values are unknown, and do not reach addresses; only
branches may depend on them. This gives the exact address of each thread in every access to shared memory.

Shared memory has 32 banks of 4 bytes. A warp's access takes at least one pass for 4 bytes a thread, two for 8 (16
threads each), four for 16 (8 threads each). Threads that read different words of one bank take further passes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

WARP = 32
BANKS = 32
WORD_BYTES = 4
# A step is one instruction of all threads. The longest program takes a tenth of it.
MAX_STEPS = 1_000_000

Value = Any  # an array of all threads' values, uint64 or bool, or None: unknown
Array = Any


class Conflicts(NamedTuple):
    """Passes over the banks.

    Attributes:
        worst: most passes per necessary pass of any access. 1 without conflicts.
        mean: passes of all accesses per necessary pass; approximate, because the assembler may merge loads otherwise.
    """

    worst: float
    mean: float


class _Instruction(NamedTuple):
    guard: str | None  # a predicate, "!" in front if negated
    opcode: str
    operands: list[str]


def bank_conflicts(ptx: str, threads: int, arguments: Sequence[object], program: int = 0) -> Conflicts | None:
    """The conflicts of one program.

    Args:
        ptx: PTX of the kernel.
        threads: threads of a program.
        arguments: arguments of the launch, in the order of the kernel's parameters, without constants and None.
            Tensors in host memory; integer tensors that are read must be contiguous.
        program: number of the program.

    Returns:
        None if the program does not access shared memory.

    Raises:
        ValueError: an address depends on values that are not known.
    """
    run = _Run(ptx, threads, arguments, program)
    run.execute()
    if not run.passes:
        return None
    necessary, taken = zip(*run.passes, strict=True)
    return Conflicts(max(t / n for n, t in run.passes), sum(taken) / sum(necessary))


def passes(addresses: Array, width: int) -> tuple[int, int]:
    """The necessary and the actual passes of one access of ``width`` bytes at each of the active threads' addresses.

    ``addresses`` is int64, [threads], -1 for an inactive thread.
    """
    group = WARP * WORD_BYTES // max(width, WORD_BYTES)
    words = np.arange(max(1, width // WORD_BYTES))
    necessary = taken = 0
    for first in range(0, len(addresses), group):
        active = addresses[first : first + group]
        active = active[active >= 0]
        if len(active):
            touched = np.unique(active[:, None] // WORD_BYTES + words)
            necessary += 1
            taken += int(np.bincount(touched % BANKS).max())
    return necessary, taken


class _Run:
    """A program's execution. `passes` has the necessary and the actual passes of every access."""

    def __init__(self, ptx: str, threads: int, arguments: Sequence[object], program: int) -> None:
        self.instructions, self.labels = _parse(ptx)
        self.threads = threads
        self.registers: dict[str, Value] = {
            "%tid.x": np.arange(threads, dtype=np.uint64),
            "%ctaid.x": self._uniform(program),
            "global_smem": self._uniform(0),
        }
        self.parameters = [self._parameter(argument) for argument in arguments]
        self.tables = [
            (argument.data_ptr(), argument.reshape(-1).view(torch.uint8).numpy())
            for argument in arguments
            if isinstance(argument, torch.Tensor) and argument.dtype in (torch.int64, torch.int32) and argument.numel()
        ]
        self.passes: list[tuple[int, int]] = []
        self._known_passes: dict[tuple[bytes, int], tuple[int, int]] = {}
        self._loads: dict[bytes, int] = {}  # since the last barrier, store or branch, by their blocks of 16 bytes

    def _uniform(self, number: int) -> Array:
        return np.full(self.threads, number & (1 << 64) - 1, dtype=np.uint64)

    def _parameter(self, argument: object) -> Value:
        if isinstance(argument, torch.Tensor):
            return self._uniform(argument.data_ptr())
        return self._uniform(argument) if isinstance(argument, int) else None

    def execute(self) -> None:
        at = 0
        for _ in range(MAX_STEPS):
            if at == len(self.instructions):
                return
            guard, opcode, operands = self.instructions[at]
            at += 1
            mask = self._mask(guard)
            if opcode in ("bra", "bra.uni"):
                self._loads.clear()
                # Threads part only where some skip a few instructions: all are taken to execute these. So does a
                # program whose branch depends on unknown values, such as the presence of a NaN.
                if mask is not None and mask.all():
                    at = self.labels[operands[0]]
            elif opcode == "ret":
                if mask is not None and mask.all():
                    return
            elif ".shared" in opcode:
                self._access(opcode, operands, mask)
            else:
                self._compute(opcode, operands, mask)
        raise ValueError(f"The program executes more than {MAX_STEPS:,} instructions.")

    def _mask(self, guard: str | None) -> Value:
        if guard is None:
            return np.ones(self.threads, dtype=bool)
        value = self.registers.get(guard.removeprefix("!"))
        return None if value is None else ~value if guard.startswith("!") else value

    def _access(self, opcode: str, operands: Sequence[str], mask: Value) -> None:
        """Count the passes of an access to shared memory, whose result is unknown."""
        if opcode.startswith("cp.async") and not opcode.startswith(("cp.async.ca", "cp.async.cg")):
            return  # waits and groups
        is_load = opcode.startswith(("ld.", "ldmatrix", "atom."))
        if is_load:
            for register in _registers(operands[0]):
                self.registers[register] = None
        address = self._address(operands[1] if is_load else operands[0])
        if address is None:
            raise ValueError(f"The address of {opcode} depends on values that are not known.")
        width = _width(opcode, operands)
        active = np.ones(self.threads, dtype=bool) if mask is None else mask
        if "matrix" in opcode:  # 8 threads name the rows of each matrix
            active = active & (np.arange(self.threads) % WARP < 8 * int(re.search(r"\.x(\d)", opcode)[1]))  # type: ignore[index]
        addresses = np.where(active, address.astype(np.int64), -1)
        if opcode.startswith("ld."):
            # The assembler merges most loads from the same 16 bytes into one.
            block = (addresses // 16).tobytes()
            if block in self._loads:
                index = self._loads[block]
                self.passes[index] = self._passes(addresses // 16 * 16, 16)
                return
            self._loads[block] = len(self.passes)
        else:
            self._loads.clear()
        if active.any():
            self.passes.append(self._passes(addresses, width))

    def _passes(self, addresses: Array, width: int) -> tuple[int, int]:
        key = (addresses - addresses.max()).tobytes(), width
        if key not in self._known_passes:
            self._known_passes[key] = passes(addresses, width)
        return self._known_passes[key]

    def _address(self, operand: str) -> Value:
        base, _, offset = operand.strip("[]").replace(" ", "").partition("+")
        value = self._value(base)
        if value is None or not offset:
            return value
        return value + np.uint64(int(offset) & (1 << 64) - 1)

    def _value(self, operand: str) -> Value:
        if operand.startswith("%") or operand == "global_smem":
            return self.registers.get(operand)
        try:
            number = int(operand.removesuffix("U"), 0)
        except ValueError:  # a floating-point constant
            return None
        return self._uniform(number)

    def _compute(self, opcode: str, operands: Sequence[str], mask: Value) -> None:
        if opcode == "bar.sync":
            self._loads.clear()
        if not operands or not operands[0].startswith(("%", "{")):
            return
        targets = _registers(operands[0])
        result = self._result(opcode, operands[1:]) if len(targets) == 1 else None
        for target in targets:
            before = self.registers.get(target)
            if mask is not None and mask.all():
                self.registers[target] = result
            elif mask is not None and result is not None and before is not None:
                self.registers[target] = np.where(mask, result, before)
            else:
                self.registers[target] = None

    def _result(self, opcode: str, operands: Sequence[str]) -> Value:
        name, *types = opcode.split(".")
        if name == "ld":
            return self._loaded(types, operands[0])
        values = [self._value(operand) for operand in operands]
        if name == "selp":
            return self._selected(*values)
        if name == "setp" and types[-1][0] == "f" and types[0] in ("eq", "ne", "neu"):
            return np.full(self.threads, types[0] != "eq")  # unknown numbers are taken to differ
        if any(value is None for value in values) or (types and types[-1][0] == "f"):
            return None
        operation = _OPERATIONS.get(name)
        return None if operation is None else operation(types, *values)

    def _selected(self, first: Value, second: Value, condition: Value) -> Value:
        if condition is None:
            return None
        if condition.all() or not condition.any():
            return first if condition.all() else second
        return None if first is None or second is None else np.where(condition, first, second)

    def _loaded(self, types: Sequence[str], operand: str) -> Value:
        size = int(types[-1][1:]) // 8
        if types[0] == "param":
            index = re.search(r"_param_(\d+)", operand)
            number = int(index[1]) if index else len(self.parameters)
            return self.parameters[number] if number < len(self.parameters) else self._uniform(0)
        address = self._address(operand)
        if address is None or types[-1][0] == "f" or size < 4:
            return None
        for start, table in self.tables:
            if start <= int(address.min()) and int(address.max()) + size <= start + len(table):
                places = (address - np.uint64(start)).astype(np.int64)[:, None] + np.arange(size)
                return np.ascontiguousarray(table[places]).view(f"uint{8 * size}")[:, 0].astype(np.uint64)
        return None


def _parse(ptx: str) -> tuple[list[_Instruction], dict[str, int]]:
    """The instructions of the kernel, and the index that each label marks."""
    body = ptx[ptx.index("{", ptx.index(".entry")) :]
    instructions: list[_Instruction] = []
    labels: dict[str, int] = {}
    for line in body.splitlines():
        text = line.partition("//")[0].strip().strip("{} \t") if re.match(r"\s*[{}]", line) else line.partition("//")[0]
        for statement in text.split(";"):
            found = re.fullmatch(r"(\$\w+):", statement.strip())
            if found:
                labels[found[1]] = len(instructions)
                continue
            match = re.fullmatch(r"(?:@(!?%p\d+)\s+)?([a-z][\w.:]*)(.*)", statement.strip())
            if match:
                operands = re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^\s,]+", match[3].replace("|", ","))
                instructions.append(_Instruction(match[1], match[2].replace("::cta", ""), operands))
        if line.startswith("}"):
            break
    return instructions, labels


def _registers(operand: str) -> list[str]:
    return re.findall(r"%\w+", operand)


def _width(opcode: str, operands: Sequence[str]) -> int:
    """Bytes that a thread accesses; of a matrix, those of a row."""
    if "matrix" in opcode:
        return 16
    if opcode.startswith("cp.async"):
        return int(operands[2], 0)
    count = re.search(r"\.v(\d)", opcode)
    bits = re.search(r"\.[bfsu](\d+)$", opcode)
    if bits is None:
        raise ValueError(f"The width of {opcode} is not known.")
    return int(bits[1]) // 8 * (int(count[1]) if count else 1)


def _bits(types: Sequence[str]) -> int:
    """The width of an instruction's operands in bits, by its types; 1 for a predicate."""
    return 1 if types[-1] == "pred" else int(types[-1][1:])


def _wrapped(types: Sequence[str], values: Array) -> Array:
    if values.dtype == bool:
        return values
    return values & np.uint64((1 << _bits(types)) - 1)


def _signed(values: Array, bits: int) -> Array:
    left = np.uint64(64 - bits)
    return (values << left).astype(np.int64) >> left.astype(np.int64)


def _number(types: Sequence[str], values: Array) -> Array:
    """Operands as integers of their type, in 64 bits."""
    bits = _bits(types)
    return _signed(values, bits) if types[-1][0] == "s" else values & np.uint64((1 << bits) - 1)


def _multiply(types: Sequence[str], a: Array, b: Array) -> Array:
    if "wide" in types:
        return _number(types, a).astype(np.uint64) * _number(types, b).astype(np.uint64)
    if "hi" in types:
        bits = _bits(types)
        if bits > 32:
            return None
        return _wrapped(types, ((_number(types, a) * _number(types, b)) >> bits).astype(np.uint64))
    return _wrapped(types, a * b)


def _multiply_add(types: Sequence[str], a: Array, b: Array, c: Array) -> Array:
    product = _multiply(types, a, b)
    if product is None:
        return None
    return product + c if "wide" in types else _wrapped(types, product + c)


def _extract(types: Sequence[str], a: Array, start: Array, length: Array) -> Array:
    if types[-1][0] == "s":
        left = np.uint64(64) - start - length
        return _wrapped(types, ((a << left).astype(np.int64) >> (left + start).astype(np.int64)).astype(np.uint64))
    return (_wrapped(types, a) >> start) & ((np.uint64(1) << length) - np.uint64(1))


def _shift_right(types: Sequence[str], a: Array, b: Array) -> Array:
    number = _number(types, a)
    return _wrapped(types, (number >> b.astype(number.dtype)).astype(np.uint64))


def _convert(types: Sequence[str], a: Array) -> Array:
    target, source = types[-2:]
    if "f" in (target[0], source[0]):
        return None
    return _wrapped([target], _number([source], a).astype(np.uint64))


_COMPARISONS: dict[str, Callable[[Array, Array], Array]] = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
}

_OPERATIONS: dict[str, Callable[..., Array]] = {
    "mov": lambda types, a: a != 0 if types[-1] == "pred" else _wrapped(types, a),
    "add": lambda types, a, b: _wrapped(types, a + b),
    "sub": lambda types, a, b: _wrapped(types, a - b),
    "mul": _multiply,
    "mad": _multiply_add,
    "shl": lambda types, a, b: _wrapped(types, np.where(b < 64, a << np.minimum(b, 63), 0).astype(np.uint64)),
    "shr": _shift_right,
    "and": lambda types, a, b: _wrapped(types, a & b),
    "or": lambda types, a, b: _wrapped(types, a | b),
    "xor": lambda types, a, b: _wrapped(types, a ^ b),
    "not": lambda types, a: ~a if a.dtype == bool else _wrapped(types, ~a),
    "neg": lambda types, a: _wrapped(types, np.uint64(0) - a),
    "min": lambda types, a, b: _wrapped(types, np.minimum(_number(types, a), _number(types, b)).astype(np.uint64)),
    "max": lambda types, a, b: _wrapped(types, np.maximum(_number(types, a), _number(types, b)).astype(np.uint64)),
    "bfe": _extract,
    "cvt": _convert,
    "setp": lambda types, a, b: _COMPARISONS[types[0]](_number(types[-1:], a), _number(types[-1:], b)),
}
