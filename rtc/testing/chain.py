"""Run eager and compiled side by side over many steps and compare what they compute and keep.

Each side has state of its own. One call a step; the outputs are compared in every step, the cache
contents after every `every`-th and the last. An autoregressive model that writes one wrong slot may
give right outputs for a long time, so a check of outputs alone proves little.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from .compare import Bounds, Comparer, Errors
from .result import ChainError, ChainResult, StepErrors
from .sides import Inputs, Side, check_inputs, check_start, reference_side, seeded


def check_chain(
    eager: Callable[..., Any],
    compiled: Callable[..., Any],
    inputs: Inputs,
    *,
    steps: int,
    state: Callable[[], Any] | None = None,
    caches: Callable[[Any], Any] | None = None,
    mode: str = "exact",
    rtol: float = 1e-10,
    atol: float = 1e-10,
    factor: float = 2.0,
    floor: float = 4.0,
    every: int = 16,
    reference: Callable[..., Any] | None = None,
    materialize: bool = True,
    seed: int = 0,
    name: str | None = None,
    check: bool = True,
) -> ChainResult:
    """Hold `compiled` against `eager` over `steps` chained calls.

    eager, compiled   models (or callables) with equal weights and caches that share no memory
    inputs(step)      -> (args, kwargs) of that call, the same for the same step; torch's random
                      numbers are seeded with the step before. With `state`: inputs(step, state)
    state()           -> a pytree of caches that the caller holds and passes in as arguments, made
                      once for each side. A container in it may be changed by the model
    caches(model)     -> a pytree of the tensors to compare as cache contents; by default `state`,
                      or the module's buffers where there is none
    mode              "exact": float64; |compiled - eager| <= atol + rtol * |eager| everywhere.
                      "tolerance": any dtype; a third model computes the same in float64, and
                      compiled may be `factor` times as far from it as eager is, plus `floor`
                      roundings of the tensor's largest value
    reference         that third model; by default a copy of `eager` in double precision
    every             compare the caches after each `every`-th step; 0: only at the end. Looking at
                      caches makes a compiler that owns them write them back, so a small value
                      tests that, a large one tests the undisturbed steady state: use both
    materialize       call `compiled.materialize()`, where it exists, before looking
    check             raise `ChainError` when they diverge; otherwise see `result.divergence`

    Stops at the first step that diverges. Raises `ValueError` where the comparison itself would
    mean nothing: shared memory, different starting states, irreproducible inputs, or exact mode
    with tensors that are not float64 and differ at all.
    """
    if steps < 1 or every < 0:
        raise ValueError(f"steps must be >= 1 and every >= 0, not {steps} and {every}")
    comparer = Comparer(Bounds(mode, rtol, atol, factor, floor))
    sides = {"eager": Side(eager, state, caches), "compiled": Side(compiled, state, caches)}
    if mode == "tolerance":
        sides["reference"] = reference_side(sides["eager"], reference, state, caches)
    check_start(sides, comparer)

    errors: list[StepErrors] = []
    out = kept = Errors()
    n_out = n_kept = 0
    for step in range(steps):
        results, given = {}, {}
        for label, side in sides.items():
            results[label], given[label] = side.call(step, seed, inputs)
        check_inputs(step, given["eager"], given["compiled"])
        out, n_out = comparer.trees(step, "output", *results.values())
        look = step == steps - 1 or (every > 0 and step % every == every - 1)
        look = look or out.bad is not None
        if look:
            looked = [side.read_caches(materialize) for side in sides.values()]
            kept, n_kept = comparer.trees(step, "cache", *looked)
        errors.append(
            StepErrors(
                step,
                out.abs,
                out.rel,
                kept.abs if look else None,
                kept.rel if look else None,
                out.eager_abs,
                kept.eager_abs if look else None,
            )
        )
        if out.bad is not None or (look and kept.bad is not None):
            break
    report = getattr(compiled, "report", None)
    result = ChainResult(
        name=str(name or getattr(eager, "__name__", type(eager).__name__)),
        mode=mode,
        steps=steps,
        every=every,
        errors=tuple(errors),
        outputs=n_out,
        caches=n_kept,
        divergence=out.bad or kept.bad,
        cache_divergence=kept.bad if out.bad else None,
        seconds={label: side.seconds for label, side in sides.items()},
        report=report().to_dict() if callable(report) else None,
    )
    if check and not result:
        raise ChainError(result)
    return result


def _same_start(eager: nn.Module, twin: nn.Module) -> None:
    """Raise ValueError where two models differ.

    A function of its own: the state dicts alias every cache, and a compiler that finds a cache
    aliased has to be careful with it for as long as they live.
    """
    ours, theirs = eager.state_dict(), twin.state_dict()
    differing = [k for k, v in ours.items() if k not in theirs or not torch.equal(v, theirs[k])]
    if differing or ours.keys() != theirs.keys():
        raise ValueError(f"build() made two different models; they differ in {differing[:4]}")


def check_compile(
    build: Callable[[], Callable[..., Any]],
    inputs: Inputs,
    *,
    steps: int,
    compile: Callable[[Any], Any] | None = None,
    options: Any = None,
    seed: int = 0,
    **checks: Any,
) -> ChainResult:
    """`check_chain` of `build()` against `compile(build())`, `rtc.compile` by default.

    build     makes a model; called twice with the same seed, so it may initialise at random
    options   `rtc.Options` for the default `compile`
    checks    the other arguments of `check_chain`

    The compiled model is closed at the end, whatever happens.
    """
    if compile is not None and options is not None:
        raise ValueError("options belong to rtc.compile: give either `compile` or `options`")
    if compile is None:
        import rtc

        kwargs = {} if options is None else {"options": options}

        def compile(model: Any) -> Any:
            return rtc.compile(model, **kwargs)

    with seeded(seed):
        eager = build()
    with seeded(seed):
        twin = build()
    if isinstance(eager, nn.Module) and isinstance(twin, nn.Module):
        _same_start(eager, twin)
    compiled = compile(twin)
    try:
        return check_chain(eager, compiled, inputs, steps=steps, seed=seed, **checks)
    finally:
        close = getattr(compiled, "close", None)
        if callable(close):
            close()
