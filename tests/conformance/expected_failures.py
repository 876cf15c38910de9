"""The tests that PyTorch's class passes on the CPU and gradwire's does not, on purpose: why, and which.

The list is kept strictly: a test in it that passes fails the lane, and so does one outside it that fails.
"""

ON_PURPOSE = {
    "expects other words of the forward after an error; gradwire's repeats what failed": [
        "test_invalid_static_graph",
    ],
}

EXPECTED_FAILURES = {test: reason for reason, tests in ON_PURPOSE.items() for test in tests}
