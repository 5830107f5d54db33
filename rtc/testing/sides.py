"""The two or three models of a chain check, each with inputs and caches of its own."""

import copy
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from .compare import Comparer, flatten, widen

Inputs = Callable[..., tuple[tuple[Any, ...], dict[str, Any]]]


class Side:
    """One model with the caches it alone uses."""

    def __init__(
        self,
        model: Callable[..., Any],
        state: Callable[[], Any] | None,
        caches: Callable[[Any], Any] | None,
        double: bool = False,
    ) -> None:
        self.model, self.caches, self.double = model, caches, double
        self.has_state = state is not None
        self.state = state() if state is not None else None
        if double:
            leaves = [x for x in flatten(self.state, "").values() if isinstance(x, Tensor)]
            if len({_storage(x) for x in leaves}) < len(leaves):
                raise ValueError("tolerance mode cannot copy a `state` whose tensors share memory")
            self.state = _rebuild(self.state, widen, {})
        self.seconds = 0.0

    def call(self, step: int, seed: int, inputs: Inputs) -> tuple[Any, Any]:
        """The outputs of one call, and the inputs it got (its own copies)."""
        ours = _storages(self.state)

        def own(x: Tensor) -> Tensor:
            if _storage(x) in ours:
                return x
            return widen(x).clone() if self.double else x.clone()

        with seeded(seed + step):
            made = inputs(step, self.state) if self.has_state else inputs(step)
        args, kwargs = _rebuild(made, own, _containers(self.state))
        given = _rebuild((args, kwargs), lambda x: None if _in(x, ours) else x.clone(), {})
        with seeded(seed + step), torch.no_grad():
            start = time.perf_counter()
            out = self.model(*args, **kwargs)
            self.seconds += time.perf_counter() - start
        return out, given

    def read_caches(self, materialize: bool) -> Any:
        write_back = getattr(self.model, "materialize", None)
        if materialize and callable(write_back):
            write_back()
        if self.caches is not None:
            return self.caches(self.model)
        if self.has_state:
            return self.state
        model = getattr(self.model, "_orig_mod", self.model)  # torch.compile's wrapper
        named = getattr(model, "named_buffers", None)
        return dict(named()) if callable(named) else {}


def reference_side(
    eager: Side,
    reference: Callable[..., Any] | None,
    state: Callable[[], Any] | None,
    caches: Callable[[Any], Any] | None,
) -> Side:
    """The side that computes in float64."""
    if reference is None:
        if not isinstance(eager.model, nn.Module):
            raise ValueError("tolerance mode needs `reference`: only a module can be copied")
        reference = copy.deepcopy(eager.model).double()
    return Side(reference, state, caches, double=True)


def check_start(sides: Mapping[str, Side], comparer: Comparer) -> None:
    """The caches must be separate and equal. Raises ValueError."""
    caches = {label: side.read_caches(materialize=True) for label, side in sides.items()}
    seen: dict[int, str] = {}
    for label, tree in caches.items():
        mine = {_storage(x): p for p, x in flatten(tree, "cache").items() if isinstance(x, Tensor)}
        shared = sorted(p for s, p in mine.items() if s in seen and seen[s] != label)
        if shared:
            raise ValueError(
                f"{label} and {seen[next(s for s in mine if s in seen)]} share the memory of "
                f"{shared[:4]}: give each side a model (or `state`) of its own"
            )
        seen |= dict.fromkeys(mine, label)
    start, _ = comparer.trees(-1, "cache", *caches.values())
    if start.bad is not None:
        raise ValueError(f"the two sides start from different caches: {start.bad}")


def check_inputs(step: int, eager: Any, compiled: Any) -> None:
    ours, theirs = flatten(eager, "inputs"), flatten(compiled, "inputs")
    same = ours.keys() == theirs.keys() and all(
        torch.equal(x, theirs[p]) if isinstance(x, Tensor) else True for p, x in ours.items()
    )
    if not same:
        raise ValueError(
            f"inputs({step}) gave the two sides different values: derive from the step"
        )


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """torch's random numbers start from `seed` inside and are as before outside."""
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices):
        torch.manual_seed(seed)
        yield


def _storage(x: Tensor) -> int:
    with torch._C.DisableTorchFunctionSubclass():  # a look at the address hands no memory out
        return x.untyped_storage().data_ptr()


def _storages(tree: Any) -> set[int]:
    return {_storage(x) for x in flatten(tree, "").values() if isinstance(x, Tensor)}


def _in(x: Any, storages: set[int]) -> bool:
    return isinstance(x, Tensor) and _storage(x) in storages


def _containers(tree: Any) -> dict[int, Any]:
    """The containers of a pytree by id: the model may change them, so they must stay themselves."""
    if not isinstance(tree, (Mapping, list, tuple)):
        return {}
    subs = tree.values() if isinstance(tree, Mapping) else tree
    found = {id(tree): tree}
    for sub in subs:
        found |= _containers(sub)
    return found


def _rebuild(tree: Any, leaf: Callable[[Tensor], Any], keep: Mapping[int, Any]) -> Any:
    """A copy of the dicts, lists and tuples in `tree` with `leaf` applied to its tensors."""
    if isinstance(tree, Tensor):
        return leaf(tree)
    if id(tree) in keep:
        return tree
    if type(tree) is dict:
        return {k: _rebuild(v, leaf, keep) for k, v in tree.items()}
    if type(tree) in (list, tuple):
        return type(tree)(_rebuild(v, leaf, keep) for v in tree)
    return tree
