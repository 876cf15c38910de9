"""Registers, spills, wide accesses and instructions per element of a compiled kernel, from its assembly.

The *hot path* is the path through the kernel that moves the most bytes in accesses of 16 bytes, with every loop taken
once: the branch for aligned data, where a kernel has two. Instructions are counted in its *hottest loop*: the one that
moves the most bytes, if these are a fifth of the path's or more. Without such a loop the whole path is counted.

An *element* is one of the largest tile that the kernel moves between global memory and a program, or joins and splits
on the way. An iteration of a loop that the assembler unrolled handles several tiles.

On AMD instructions are not counted: branches become masks there, so both branches lie on one path.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

from tools.ahead_of_time import TARGETS, Compiled

WIDE_BYTES = 16
# A loop is the kernel's main loop if it moves at least this share of the bytes on the hot path. A pipelined loop may
# move less than half of them, because the prologue fills the pipeline.
LOOP_SHARE = 0.2


@dataclass(frozen=True)
class Binary:
    """Facts about a compiled kernel.

    Attributes:
        registers: registers of one thread.
        spills: accesses or slots of memory that stands in for registers.
        shared: bytes of shared memory of one program.
        loaded: bytes that the wide (128 bits or more) loads of one program read, each load taken once.
        stored: bytes that its wide stores write.
        fences: instructions that make memory accesses visible to the whole GPU, or forget what a cache holds.
        instructions: instructions of a thread, in the hottest loop or on the hot path. On AMD, unknown from here on.
        elements: elements of a thread there; 0 if the kernel moves no tiles.
        is_loop: whether instructions are counted in a loop.
        program_elements: elements of a program, in all iterations; None if their number depends on data.
    """

    registers: int
    spills: int
    shared: int
    loaded: int
    stored: int
    fences: int
    instructions: int = 0
    elements: float = 0.0
    is_loop: bool = False
    program_elements: int | None = None

    @property
    def instructions_per_element(self) -> float | None:
        """Instructions that the kernel executes per element, in its hottest part; None if that is not known."""
        return self.instructions / self.elements if self.elements else None


def inspect(compiled: Compiled) -> Binary:
    """The facts about a compiled kernel."""
    if TARGETS[compiled.target].backend == "hip":
        return _amd_binary(compiled)
    lines = _lines(compiled.assembly)
    part, is_loop = _hottest(lines)
    elements, program_elements = _elements(compiled, part, is_loop)
    wide = [line for line in lines if line.nbytes >= WIDE_BYTES]
    return Binary(
        registers=_counted(r"REG:(\d+)", compiled.usage),
        spills=len(re.findall(r"\b(?:LDL|STL)\b", compiled.assembly)) + _counted(r"STACK:(\d+)", compiled.usage),
        fences=len(re.findall(_FENCES, compiled.assembly)),
        shared=compiled.shared,
        loaded=compiled.threads * sum(line.nbytes for line in wide if not line.is_store),
        stored=compiled.threads * sum(line.nbytes for line in wide if line.is_store),
        instructions=len(part),
        elements=elements,
        is_loop=is_loop,
        program_elements=program_elements,
    )


# Of a multiprocessor: CUDA C++ Programming Guide, "Technical Specifications per Compute Capability", 8.0, 9.0 and 10.0;
# Blackwell Tuning Guide, "Occupancy". Registers are allocated to a warp in units of 256, 8 for each thread.
REGISTERS, REGISTER_UNIT, WARP = 65536, 8, 32
RESIDENT_WARPS, RESIDENT_PROGRAMS = 64, 32
SHARED_KIB = {"sm_80": 164, "sm_90": 228, "sm_100": 228}
RESERVED_BYTES = 1024  # shared memory that the system reserves per program


def resident_programs(binary: Binary, compiled: Compiled) -> int:
    """How many programs of a kernel a multiprocessor of an NVIDIA GPU holds at once."""
    warps = -(-compiled.threads // WARP)
    registers = -(-binary.registers // REGISTER_UNIT) * REGISTER_UNIT * WARP * warps
    shared = 1024 * SHARED_KIB[compiled.target] // (binary.shared + RESERVED_BYTES)
    return min(REGISTERS // registers, RESIDENT_WARPS // warps, RESIDENT_PROGRAMS, shared)


class _Line(NamedTuple):
    """An instruction.

    Attributes:
        nbytes: bytes that a thread moves between global memory and the program.
        is_store: whether it writes them.
        target: index of the instruction that it may branch to.
        ends: whether the next instruction does not follow.
        is_exit: whether the kernel may end here.
    """

    nbytes: int
    is_store: bool
    target: int | None
    ends: bool
    is_exit: bool


def _lines(sass: str) -> list[_Line]:
    found = re.findall(r"/\*([0-9a-f]{4,})\*/\s+(@!?U?P\w+\s+)?([A-Z][\w.]*)([^;]*);", sass)
    index = {int(address, 16): i for i, (address, *_) in enumerate(found)}
    names = [opcode.partition(".")[0] for _, _, opcode, _ in found]
    # Where nothing returns, a call is a far branch.
    branches = ("BRA",) if "RET" in names else ("BRA", "CALL")
    lines = []
    for name, (_, guard, opcode, operands) in zip(names, found, strict=True):
        nbytes = 0
        if name in ("LDG", "STG", "LDGSTS"):
            bits = re.search(r"\.(?:[US])?(8|16|64|128|256)\b", opcode.replace("LTC128B", "").replace("LTC256B", ""))
            nbytes = int(bits[1]) // 8 if bits else 4
        address = re.search(r"0x([0-9a-f]+)\s*$", operands) if name in branches else None
        target = index.get(int(address[1], 16)) if address else None
        is_conditional = guard or re.search(r"\bU?P\w", operands)  # a condition may be among the operands
        ends = not is_conditional and name in (*branches, "EXIT", "RET")
        lines.append(_Line(nbytes, name == "STG", target, ends, name == "EXIT"))
    return lines


def _hottest(lines: list[_Line]) -> tuple[list[_Line], bool]:
    """The lines of the hottest loop or of the hot path, and whether it is a loop."""
    path = _hot_path(lines, 0, len(lines) - 1)
    on_path = set(path)
    loops = [
        _hot_path(lines, line.target, end)
        for end, line in enumerate(lines)
        if line.target is not None and line.target < end and not on_path.isdisjoint(range(line.target, end + 1))
    ]
    moved = [sum(lines[i].nbytes for i in loop) for loop in loops]
    wide = [sum(lines[i].nbytes for i in loop if lines[i].nbytes >= WIDE_BYTES) for loop in loops]
    best = max(range(len(loops)), key=lambda i: (wide[i], moved[i], -len(loops[i])), default=None)
    if best is not None and moved[best] > 0 and moved[best] >= LOOP_SHARE * sum(lines[i].nbytes for i in path):
        return [lines[i] for i in loops[best]], True
    return [lines[i] for i in path], False


def _hot_path(lines: list[_Line], first: int, last: int) -> list[int]:
    """The indices of the instructions on the hot path from ``first`` to ``last`` or to the end of the kernel.

    It has the most wide bytes; of such paths the most bytes; of such paths the fewest instructions.
    """
    impossible = (-1, 0, 0)
    scores = {last + 1: impossible}
    following: dict[int, int] = {}
    for i in range(last, first - 1, -1):
        line = lines[i]
        choices = [i + 1] if i < last and not line.ends else []
        if line.target is not None and i < line.target <= last:
            choices.append(line.target)
        best = (0, 0, 0) if i == last or line.is_exit else impossible
        if choices:
            following[i] = max(choices, key=lambda choice: scores[choice])
            best = max(best, scores[following[i]])
        wide = line.nbytes if line.nbytes >= WIDE_BYTES else 0
        scores[i] = (best[0] + wide, best[1] + line.nbytes, best[2] - 1) if best != impossible else impossible
    path = [first]
    while path[-1] in following and scores[following[path[-1]]] != impossible:
        path.append(following[path[-1]])
    return path


_ACCESS = re.compile(r"(?:tt\.load|tt\.store|ttg\.async_copy_global_to_local)\b.*")
_PLANES = re.compile(r"tt\.(?:join|split)\b.*")
_TILE = re.compile(r"(?:tensor<((?:\d+x)+))?!tt\.ptr<\w*?(\d+)\w*>(?:, (#\w+|#ttg\.slice<\{dim = \d, parent = #\w+))?")
_LAYOUT = re.compile(
    r"(#\w+) = #ttg\.blocked<\{sizePerThread = \[(.*?)\], threadsPerWarp = \[(.*?)\], warpsPerCTA = \[(.*?)\]"
)


class _Tiles:
    """The tiles that a kernel moves through global memory, from its TTGIR."""

    def __init__(self, ttgir: str) -> None:
        self.lines = ttgir.splitlines()
        self.layouts = {
            name: [tuple(map(int, numbers.split(", "))) for numbers in fields]
            for name, *fields in _LAYOUT.findall(ttgir)
        }

    def elements(self, line: str) -> int:
        """Elements of the tile that a line moves, joins or splits; 0 if it does not."""
        shape, _, _ = self._access(line)
        planes = _PLANES.search(line)
        shapes = re.findall(r"tensor<((?:\d+x)+)", planes[0]) if planes else []
        return max([prod(shape) if shape else 0, *(prod(map(int, each.split("x")[:-1])) for each in shapes)])

    def thread_bytes(self, lines: list[str]) -> int:
        """Bytes that a thread moves in the lines. Threads that share an element move it all."""
        total = 0
        for line in lines:
            shape, itemsize, layout = self._access(line)
            total += itemsize * self._thread_elements(shape, layout)
        return total

    def _access(self, line: str) -> tuple[tuple[int, ...], int, str]:
        """Shape, bytes of an element, and layout."""
        access = _ACCESS.search(line)
        tile = _TILE.search(access[0]) if access else None
        if tile is None:
            return (), 0, ""
        shape = tuple(map(int, tile[1].split("x")[:-1])) if tile[1] else ()
        return shape, max(1, int(tile[2]) // 8), tile[3] or ""

    def _thread_elements(self, shape: tuple[int, ...], layout: str) -> int:
        sliced = re.fullmatch(r"#ttg\.slice<\{dim = (\d), parent = (#\w+)", layout)
        fields = self.layouts.get(sliced[2] if sliced else layout, [])
        axes = list(zip(*fields, strict=True))
        if sliced:
            del axes[int(sliced[1])]
        counts = []
        for length, (size, *others) in zip(shape, axes, strict=False):
            held = min(length, size)
            counts.append(held * -(-length // (held * prod(others))))
        return prod(counts)


def _elements(compiled: Compiled, part: list[_Line], is_loop: bool) -> tuple[float, int | None]:
    """Elements of a thread in the hottest loop or on the hot path, and of a program."""
    tiles = _Tiles(compiled.ttgir)
    tile = max(map(tiles.elements, tiles.lines), default=0)
    if not is_loop:
        return tile / compiled.threads, tile
    hottest = max(_loops(tiles.lines), key=tiles.thread_bytes)
    per_iteration = tiles.thread_bytes(hottest)
    unrolled = max(1, round(sum(line.nbytes for line in part) / per_iteration)) if per_iteration else 1
    bounds = re.search(r"scf\.for .* = %c(\d+)\w* to %c(\d+)\w* step %c(\d+)", hottest[0])
    iterations = len(range(*map(int, bounds.groups()))) if bounds else None
    return unrolled * tile / compiled.threads, None if iterations is None else iterations * tile


def _loops(lines: list[str]) -> list[list[str]]:
    """The lines of every loop, its head first, by their indentation."""
    loops = []
    for start, line in enumerate(lines):
        if "scf.for" in line or "scf.while" in line:
            indent = line[: len(line) - len(line.lstrip())]
            end = next(
                (i for i in range(start + 1, len(lines)) if re.match(rf"{indent}}}(?! do)", lines[i])), len(lines)
            )
            loops.append(lines[start:end])
    return loops


_FENCES = r"\b(?:MEMBAR\S*\.(?:GPU|SYS|VC)|ERRBAR|(?<!\.)CCTL\.IVALL)\b"


def _counted(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    assert found, pattern
    return int(found[1])


def _amd_binary(compiled: Compiled) -> Binary:
    def field(name: str) -> int:
        return _counted(rf"\.{name}:\s+(\d+)", compiled.assembly)

    def wide(kind: str) -> int:
        count = len(re.findall(rf"\b(?:global|buffer)_{kind}_dwordx4\b", compiled.assembly))
        return compiled.threads * WIDE_BYTES * count

    return Binary(
        registers=field("vgpr_count"),
        spills=field("vgpr_spill_count") + field("sgpr_spill_count") + field("private_segment_fixed_size"),
        shared=compiled.shared,
        loaded=wide("load"),
        stored=wide("store"),
        fences=len(re.findall(r"\bbuffer_(?:wbl2|inv)\b", compiled.assembly)),
    )
