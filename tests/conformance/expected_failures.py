"""The tests that PyTorch's class passes on the CPU and gradwire's does not: why, and which.

Both lists are kept strictly: a test in them that passes fails the lane, and so does one outside them that fails.
"""

NOT_YET = {
    "collectives run in the executor's thread, which a profiler of the training thread does not see": [
        "test_ddp_profiling_torch_profiler",
    ],
}

ON_PURPOSE = {
    "mixed_precision, experimental in PyTorch, is not supported": [
        "test_ddp_native_mixed_precision_ignored_params",
        "test_ddp_native_mixed_precision_no_grad_as_bucket_view_no_set_grad_none",
        "test_ddp_native_mixed_precision_grad_as_bucket_view_no_set_grad_none",
        "test_ddp_native_mixed_precision_grad_as_bucket_view_set_grad_to_none",
        "test_ddp_native_mixed_precision_no_grad_as_bucket_view_set_grad_to_none",
    ],
    "expects the forward after an error to fail as well; gradwire's starts afresh": [
        "test_invalid_static_graph",
    ],
}

EXPECTED_FAILURES = {
    test: f"{title}: {reason}"
    for title, group in (("not yet", NOT_YET), ("on purpose", ON_PURPOSE))
    for reason, tests in group.items()
    for test in tests
}
