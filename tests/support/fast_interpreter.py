"""Triton's interpreter patches the language at each call of a device function, which takes a third of its time.

A kernel patches the modules of the language that its own module imports, and restores them at its end. A device
function patches those of its module for good. So a patched module needs no further patch.
"""

from functools import cache


def install():
    """Let device functions patch only what is not patched."""
    from triton.runtime import interpreter

    shipped, languages = interpreter._patch_lang, (interpreter.tl, interpreter.tl.core)
    of_kernel, for_good = set(), set()  # patched modules

    @cache
    def imported_by(function):
        values = list(function.__globals__.values())
        return {module for module in languages if any(value is module for value in values)}

    class KernelScope:
        def __init__(self, function):
            self._scope = shipped(function)
            of_kernel.update(imported_by(function))

        def restore(self):
            self._scope.restore()
            of_kernel.clear()

    def patch_lang(function):
        if not of_kernel:
            return KernelScope(function)
        if missing := imported_by(function) - of_kernel - for_good:
            shipped(function)
            for_good.update(missing)
        return None

    interpreter._patch_lang = patch_lang
