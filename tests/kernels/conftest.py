"""Triton's interpreter, for the test files that run again in a process with TRITON_INTERPRET=1."""

import importlib.util
import os

if importlib.util.find_spec("triton") and os.environ.get("TRITON_INTERPRET") == "1":
    from triton.runtime import interpreter

    _patch = interpreter._patch_lang_tensor

    def _patch_for_numpy(tensor, scope):
        """Triton 3.6 calls int() on arrays of one element, which NumPy 2.4 no longer takes."""
        _patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = _patch_for_numpy
