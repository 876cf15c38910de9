"""Kernels: the fused device work of gradient compression. The package issues no collectives.

    flatten             gradients <-> one flat wire buffer, with scale, saturation and cast
    delayed_scaling     the scale of a 16-bit wire, from the previous step's largest magnitude
    lowrank             PowerSGD's three passes over the matrices of a bucket, and the factors of the next step
    orthogonalize       an orthonormal basis of every low-rank factor
    quantize            gradients <-> messages of 1 to 32 bits an element, block by block, with error feedback
    wire_formats        the encodings of these messages
    counter_random      random numbers that are equal on every rank and device
    segment_table, block_table, matrix_table    where the tensors, blocks and factors of a bucket lie
    layouts, uploads    memory order and dtypes of tensors; integers that kernels read on the device
    dispatch            whether Triton kernels run
    launch              launches of Triton kernels, and their recording for later steps

A family is a file ``NAME``, with its references in plain PyTorch and the CPU paths, and a file ``NAME_triton``. The CPU
paths of `quantize` are in `quantize_cpu`; `common_triton` has the device functions of several families.

The references specify the operations: formulas, and arguments with shapes, dtypes and what is modified. A bucket binds
the implementations for its device once, by ``bound_*`` or `flatten_kernels`: Triton kernels, CPU paths or
references. Bound functions take the arguments of the references, and check nothing: layouts are checked where they are
made.
"""

from gradwire.kernels.block_table import (
    HEADER_BYTES,
    MAX_BLOCK_SIZE,
    MIN_BLOCK_SIZE,
    BlockTable,
    MessageLayout,
    Section,
)
from gradwire.kernels.counter_random import random_key, uniform
from gradwire.kernels.delayed_scaling import MAX_EXPONENT, bound_update_scale, update_scale_reference
from gradwire.kernels.dispatch import use_triton
from gradwire.kernels.flatten import flatten_kernels, flatten_reference, unflatten_reference
from gradwire.kernels.launch import Recording, is_recording
from gradwire.kernels.layouts import (
    WIRE_DTYPES,
    as_real,
    compute_dtype,
    gradient_layout,
    is_dense,
    layout_guard,
    layout_in_dtype,
    memory_order,
)
from gradwire.kernels.lowrank import (
    backproject_reference,
    bound_low_rank,
    bound_renew,
    draw,
    project_reference,
    reconstruct_reference,
    renew_reference,
)
from gradwire.kernels.matrix_table import (
    ALIGN_NUMEL,
    FactorLayout,
    Matrix,
    MatrixTable,
    Operands,
    OwnFactor,
    Renewal,
    Uncompressed,
)
from gradwire.kernels.orthogonalize import bound_orthogonalize, orthogonalize_reference
from gradwire.kernels.quantize import (
    QuantizationKernels,
    bound_quantization,
    commit_errors_reference,
    dequantize_reference,
    quantize_reference,
    reduce_quantized_reference,
    sum_quantized_reference,
)
from gradwire.kernels.segment_table import SegmentTable
from gradwire.kernels.uploads import is_capturing, upload
from gradwire.kernels.wire_formats import WIRE_FORMATS, Rounding, WireFormat
