"""The laws of a compressor, as property tests for your own hook: `check_laws`."""

try:
    import hypothesis  # noqa: F401
except ModuleNotFoundError as error:
    raise ModuleNotFoundError("gradwire.testing needs hypothesis: pip install hypothesis") from error

from gradwire.testing._check import LAWS, LawViolation, check_laws

__all__ = ["LAWS", "LawViolation", "check_laws"]


def __dir__() -> list[str]:
    return __all__
