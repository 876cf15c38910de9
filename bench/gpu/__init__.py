"""The GPU lane, ``python -m gradwire.bench.gpu``: tests, sanitizer and benchmarks. Needs only torch and triton."""
