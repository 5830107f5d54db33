"""Whatever looks at a cache between two calls sees the program's own order."""

# mypy: no-check-untyped-defs, allow-untyped-defs

import copy
import io
import pickle
import threading

import numpy as np
import pytest
import torch

from .models import chain, close, pair, same_caches


def saved(t):
    file = io.BytesIO()
    torch.save(t, file)
    file.seek(0)
    return torch.load(file)


def in_thread(t):
    out = []
    thread = threading.Thread(target=lambda: out.append(t.cumsum(2)))
    thread.start()
    thread.join()
    return out[0]


def out_of_numpy(t):
    return torch.from_numpy(np.asarray(t).copy())


READS = {
    "clone": lambda t: t.clone(),
    "index": lambda t: t[:, :, -3],
    "strides": lambda t: t[..., ::2, 1],
    "cumsum": lambda t: t.cumsum(2),
    "list": lambda t: torch.stack(list(t[0, 0])),
    "tolist": lambda t: torch.tensor(t.tolist(), dtype=torch.float64),
    "item": lambda t: torch.tensor(t[0, 0, 4, 3].item(), dtype=torch.float64),
    "unbind": lambda t: torch.stack(t.unbind(2)),
    "cat": lambda t: torch.cat([torch.ones_like(t), t]),
    "argument": lambda t: torch.where(torch.ones(14, 1, dtype=torch.bool), 0.0, t) + t,
    "aten": lambda t: torch.ops.aten.slice.Tensor(t, 2, 3, 5).clone(),
    "detach": lambda t: t.detach().clone(),
    "data": lambda t: t.data.clone(),
    "numpy": out_of_numpy,
    "memory": lambda t: torch.tensor(t.untyped_storage().tolist()),
    "dlpack": lambda t: torch.from_dlpack(t).clone(),
    "deepcopy": copy.deepcopy,
    "copy": lambda t: copy.copy(t).clone(),
    "pickle": lambda t: pickle.loads(pickle.dumps(t)),
    "save": saved,
    "thread": in_thread,
    "vmap": lambda t: torch.vmap(lambda r: r.cumsum(0))(t[0, 0]),
    "sort": lambda t: t.sum(-1).sort(2).indices.double(),
    "torch.compile": lambda t: torch.compile(lambda u: u.cumsum(2), backend="eager")(t),
    "inference": lambda t: torch.inference_mode()(lambda: t.cumsum(2))(),
    "torch.tensor": lambda t: torch.tensor(t),
    "as_subclass": lambda t: t.as_subclass(torch.Tensor).clone(),
    "jit": lambda t: torch.jit.trace(lambda u: u.cumsum(2), torch.zeros(1, 2, 14, 8).double())(t),
    "vmap whole": lambda t: torch.vmap(lambda u: u.cumsum(1))(t),
}


@pytest.fixture(autouse=True)
def _no_grad():
    with torch.no_grad():
        yield


@pytest.mark.parametrize("read", READS)
def test_by_any_road(read):
    eager, model, compiled = pair()
    for first in (0, 7, 11):  # offsets in the ring
        chain(eager, compiled, range(first, first + 4))
        close(READS[read](eager.k), READS[read](model.k))
        chain(eager, compiled, range(first + 4, first + 6))
        close(READS[read](eager.v), READS[read](model.v))
    chain(eager, compiled, range(20, 23))
    same_caches(eager, model)


def test_printing():
    eager, model, compiled = pair()
    chain(eager, compiled, range(7))
    assert repr(model.k) == repr(eager.k)
    chain(eager, compiled, range(7, 9))
    assert f"{model.v[0, 0, :, 0]}" == f"{eager.v[0, 0, :, 0]}"


def test_the_state_dict():
    eager, model, compiled = pair()
    chain(eager, compiled, range(7))
    state = model.state_dict()
    close(eager.k, state["k"])
    chain(eager, compiled, range(7, 9))
    close(eager.k, state["k"])  # it is an alias, and stays one
    assert state["k"].data_ptr() == model.k.data_ptr()


def test_a_tensor_looks_like_a_tensor():
    """What the guard answers itself is right, and no trace of it is left at the end."""
    _, model, compiled = pair()
    for step in range(5):
        compiled(torch.zeros(1, 3, 6).double(), step)
        assert isinstance(model.k, torch.Tensor)
        assert model.k.shape == (1, 2, 14, 8)
        assert model.k.dtype is torch.float64
        assert not model.k.requires_grad
    compiled.close()
    assert type(model.k) is torch.Tensor


def test_metadata_alone_leaves_the_ring_as_it_is():
    eager, model, compiled = pair()
    chain(eager, compiled, range(5))
    before = compiled.report().to_dict()["runtime"]["materializations"]
    assert model.k.shape[2] * model.k.element_size() == 14 * 8
    assert model.k.device.type == "cpu"
    assert model.k.is_contiguous()
    assert compiled.report().to_dict()["runtime"]["materializations"] == before
    chain(eager, compiled, range(5, 15))
    same_caches(eager, model)


def test_a_steady_chain_copies_no_cache():
    eager, _, compiled = pair()
    chain(eager, compiled, range(40))
    seen = compiled.report().to_dict()["runtime"]
    assert seen["materializations"] == 0
    assert seen["plain_calls"] == 0
    assert seen["imports"] == 1


def test_a_transform_that_refuses_the_guard_says_so():
    """torch.func.grad takes no guarded tensor: loud, and right after materialize()."""
    eager, model, compiled = pair()
    chain(eager, compiled, range(7))

    def grad(t):
        return torch.func.grad(lambda u: (u**2).sum())(t)

    with pytest.raises(RuntimeError):
        grad(model.k)
    compiled.close()
    torch.testing.assert_close(grad(model.k), grad(eager.k), rtol=0, atol=1e-12)
