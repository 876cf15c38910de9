"""The operations of `gradwire.kernels` as functions, bound to the device of their arguments in every call."""

from gradwire import kernels


def flatten(tensors, out, *, table=None, **options):
    table = table or kernels.SegmentTable(tensors)
    kernels.flatten_kernels(table).flatten(tensors, table, out, **options)
    return out


def unflatten(wire, tensors, *, table=None, **options):
    table = table or kernels.SegmentTable(tensors)
    kernels.flatten_kernels(table).unflatten(wire, tensors, table, **options)


def quantize(tensors, section, message, **options):
    kernels.bound_quantization(message.device).quantize(tensors, section, message, **options)


def reduce_quantized(received, section, result, **options):
    kernels.bound_quantization(received.device).reduce_quantized(received, section, result, **options)


def sum_quantized(received, section, total, *, rank):
    kernels.bound_quantization(received.device).sum_quantized(received, section, total, rank)


def dequantize(gathered, section, tensors):
    kernels.bound_quantization(gathered.device).dequantize(gathered, section, tensors)


def commit_errors(gathered, pending, errors):
    kernels.bound_quantization(gathered.device).commit_errors(gathered, pending, errors)


def project(operands, q, p, *, scale):
    kernels.bound_low_rank(operands.table).project(operands, q, p, scale)


def backproject(operands, p, q, *, scale):
    kernels.bound_low_rank(operands.table).backproject(operands, p, q, scale)


def reconstruct(operands, p, q, finite):
    kernels.bound_low_rank(operands.table).reconstruct(operands, p, q, finite)


def orthogonalize(wire, layout, out, finite):
    bound = kernels.bound_orthogonalize(out.device, wire.dtype, out.dtype, max(layout.ranks))
    bound(wire, layout, out, finite)


def renew(wire, layout, keys, step, following, finite):
    kernels.bound_renew(following.device, following.dtype)(wire, layout, keys, step, following, finite)
