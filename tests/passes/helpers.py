"""What tests of FP8 passes share: a model and its compiled twin, called step by step."""

# mypy: no-check-untyped-defs, allow-untyped-defs

import copy

import torch

import rtc


class Chain:
    """``errors`` of the output, |compiled - eager| / |eager|, by step; ``worst`` of them.

    build      () -> model
    inputs     step -> arguments of a call
    """

    def __init__(self, build, options, inputs, steps):
        torch._dynamo.reset()
        torch.manual_seed(0)
        self.eager = build()
        self.twin = copy.deepcopy(self.eager)
        self.compiled = rtc.compile(self.twin, options=options)
        self.errors = []
        for step in range(steps):
            a, b = self.eager(*inputs(step)), self.compiled(*inputs(step))
            pairs = list(zip(a, b, strict=True)) if isinstance(a, tuple) else [(a, b)]
            self.errors.append(max(self.far(have, want) for want, have in pairs))
        self.worst = max(self.errors)
        self.report = self.compiled.report().to_dict()

    @staticmethod
    def far(have, want):
        error = ((have - want).norm() / want.norm()).item()
        return error if error == error else float("inf")

    def view_bytes(self):
        return [c["view_bytes"] for g in self.report["graphs"] for c in g["caches"]]

    def check_caches(self):
        """Caches hold what eager's hold: they are kept raw, FP8 is beside them."""
        self.compiled.materialize()
        twins = dict(self.twin.named_buffers())
        for name, want in self.eager.named_buffers():
            have = twins[name]
            assert have.dtype == want.dtype
            torch.testing.assert_close(have.float(), want.float(), rtol=1e-6, atol=1e-6)
