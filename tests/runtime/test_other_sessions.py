"""While a call runs, an op of the model or another thread may have the caches of another session or
model in hand: those stay guarded. And which caches are the call's own, wherever they hang."""

# mypy: no-check-untyped-defs, allow-untyped-defs

import copy
import dataclasses
import threading
import weakref
from collections import OrderedDict, defaultdict, deque, namedtuple
from functools import partial

import pytest
import torch
from torch import nn

import rtc
from rtc.runtime import owners, reach

from .models import (
    EAGER,
    Attention,
    Given,
    Window,
    close,
    graphs,
    pair,
    runtime,
    same_caches,
    x,
    zeros,
)

REPLAY = rtc.Options(lowering="eager", step_graph="simulate", warn=False)
ORDER = torch.arange(1.0, 15, dtype=torch.float64)[:, None]  # a sum alone is the same in any order

hows = pytest.mark.parametrize(
    ("options", "inference"), [(EAGER, False), (REPLAY, True)], ids=["normal", "inference, replay"]
)


def mode(inference):
    return torch.inference_mode() if inference else torch.no_grad()


MEANWHILE = []  # what the op does in the call under way


@torch.library.custom_op("rtc_tests::meanwhile", mutates_args=())
def meanwhile(x: torch.Tensor) -> torch.Tensor:
    return x + MEANWHILE[-1](x)


@meanwhile.register_fake
def _(x):
    return torch.empty_like(x)


def during(do, model, *args):
    MEANWHILE.append(do)
    try:
        return model(*args)
    finally:
        MEANWHILE.pop()


class Before(Given):
    """The op comes before the caches are written."""

    def forward(self, x, k, v, step):
        return super().forward(meanwhile(x), k, v, step)


class After(Window):
    def forward(self, x, step):
        return meanwhile(super().forward(x, step))


def sessions(count):
    return [[(zeros(), zeros()) for _ in range(count)] for _ in range(2)]


def number(t):
    return 0.01 * (t * torch.arange(1.0, t.numel() + 1, dtype=t.dtype).view(t.shape)).mean()


class KVList(list):
    pass


class KVTuple(tuple):
    __slots__ = ()


def a_part(k, v):
    k[:, :, 3:6] *= 0.25
    return k


def moved(k, v):
    k[:, :, 2:] = v[:, :, 2:].flip(2)
    return v


def unseen(k, v):
    k.data[:, :, 3:6] *= 0.25
    return k


VISITS = {
    "looks": [
        lambda k, v: k.clone(),
        lambda k, v: (k * ORDER).sum(),
        lambda k, v: k[:, :, 4:5] - v[:, :, -1:],
        lambda k, v: torch.cat([k, v]),
        lambda k, v: torch.stack(KVList([k, v])),
        lambda k, v: copy.deepcopy(k),
    ],
    "writes": [a_part, lambda k, v: v[:, :, :5].zero_(), moved],
    # from then on the caches are kept in order
    "exports": [unseen, lambda k, v: torch.from_numpy(v.numpy().copy())],
}


@hows
@pytest.mark.parametrize(
    ("visit", "other"),
    [("looks", "session"), ("looks", "model"), ("writes", "session"), ("writes", "model"),
     ("exports", "model")],
)  # fmt: skip
def test_an_op_of_a_call_has_other_caches_in_hand(visit, other, options, inference):
    with mode(inference):
        eager, _, compiled = pair(Before, options)
        (mine, idle), (its, its_idle) = sessions(2)
        run, its_run = eager, compiled
        if other == "model":
            e, twin, c = pair(Window, options)
            idle, its_idle = (e.k, e.v), (twin.k, twin.v)
            run, its_run = (lambda x, k, v, s: e(x, s)), (lambda x, k, v, s: c(x, s))
        for step in range(18):
            close(
                during(lambda _: 0.0, run, x(step), *idle, step),
                during(lambda _: 0.0, its_run, x(step), *its_idle, step),
            )
            if step % 7 == 6:
                continue  # twice in a row
            look = VISITS[visit][step % len(VISITS[visit])]
            y = x(100 + step)
            close(
                during(lambda _, look=look: number(look(*idle)), eager, y, *mine, step),
                during(lambda _, look=look: number(look(*its_idle)), compiled, y, *its, step),
            )
        for a, b in zip((*mine, *idle), (*its, *its_idle), strict=True):
            close(a, b)
        assert not owners.UNDER_WAY


@hows
@pytest.mark.parametrize(
    ("outer", "inner"),
    [(Before, "session"), (Before, "model"), (After, "model")],
    ids=["a session", "a model", "a model, late"],
)
def test_an_op_of_a_call_calls_a_compiled_model(outer, inner, options, inference):
    """The caches of its own call are as it left them, after it and after the call inside."""
    with mode(inference):
        eager, twin, compiled = pair(outer, options)
        (mine, idle), (its, its_idle) = sessions(2)
        runs = [lambda y, step: eager(y, *idle, step), lambda y, step: compiled(y, *its_idle, step)]
        if inner == "model":
            e, inside, c = pair(Window, options)
            runs, idle, its_idle = [e, c], (e.k, e.v), (inside.k, inside.v)
        own = [(), ()] if outer is After else [mine, its]
        for step in range(16):
            if step % 3 == 1:  # the inner one alone
                close(*(during(lambda _: 0.0, run, x(50 + step), step) for run in runs))

            def call(y, run, step=step):
                return 0.1 * during(lambda _: 0.5, run, y, step)

            close(
                during(partial(call, run=runs[0]), eager, x(step), *own[0], step),
                during(partial(call, run=runs[1]), compiled, x(step), *own[1], step),
            )
            if step % 5 == 4:
                close(idle[0], its_idle[0])
        for a, b in zip((*idle, *own[0]), (*its_idle, *own[1]), strict=True):
            close(a, b)
        if outer is After:
            same_caches(eager, twin)
        assert not owners.UNDER_WAY
    assert graphs(compiled) <= 3
    assert runtime(compiled)["plain_calls"] == 0


def test_an_op_of_a_call_runs_a_compiled_model_eagerly():
    """Dynamo steps aside: what the inner call may touch is in order, the outer one's stays."""
    with torch.no_grad():
        eager, _, compiled = pair(Before, REPLAY)
        e, twin, c = pair(Window, REPLAY)
        mine, its = (zeros(), zeros()), (zeros(), zeros())

        def call(y, run, step):
            with torch.compiler.set_stance("force_eager" if step % 3 == 2 else "default"):
                return 0.1 * run(y, step)

        for step in range(14):
            close(
                during(partial(call, run=e, step=step), eager, x(step), *mine, step),
                during(partial(call, run=c, step=step), compiled, x(step), *its, step),
            )
            if step % 4 == 1:
                close(e(x(step), step), c(x(step), step))
        close(torch.cat(mine), torch.cat(its))
        same_caches(e, twin)


def in_turns(eager, compiled, sessions, step):
    """A call of each session, in which nothing happens besides."""
    for a, b in sessions:
        close(
            during(lambda _: 0.0, eager, x(step), *a, step),
            during(lambda _: 0.0, compiled, x(step), *b, step),
        )


def test_an_op_that_fails_in_a_call():
    """No call is under way after it, and every cache is guarded."""

    def fails(_):
        raise ArithmeticError("by the test")

    with torch.no_grad():
        eager, _, compiled = pair(Before, REPLAY)
        (mine, idle), (its, its_idle) = sessions(2)
        for step in range(16):
            in_turns(eager, compiled, ((mine, its), (idle, its_idle)), step)
            if step % 5 == 3:
                with pytest.raises(ArithmeticError, match="by the test"):
                    during(fails, compiled, x(step), *its, step)
                assert not owners.UNDER_WAY
                close(*((c[0] * ORDER).sum() for c in (idle, its_idle)))
                close(*((c[0] * ORDER).sum() for c in (mine, its)))


@pytest.mark.parametrize("look", [VISITS["looks"][0], a_part], ids=["reads", "writes"])
@pytest.mark.parametrize("inference", [False, True], ids=["normal", "inference"])
def test_a_thread_has_an_idle_session_in_hand(inference, look):
    """It comes while the op runs. If it has to wait for the call to end, that is all."""

    def visit(_):
        inside.set()
        done.wait(0.05)
        return 0.0

    def visitor():
        with mode(inference):
            assert inside.wait(30)
            seen.append(look(*its_idle).clone())
            done.set()

    with mode(inference):
        eager, _, compiled = pair(Before, EAGER)
        (mine, idle), (its, its_idle) = sessions(2)
        for step in range(10):
            in_turns(eager, compiled, ((mine, its), (idle, its_idle)), step)
            if step < 4:
                continue
            inside, done, seen = threading.Event(), threading.Event(), []
            thread = threading.Thread(target=visitor, daemon=True)
            thread.start()
            got = during(visit, compiled, x(50 + step), *its, step)
            thread.join(30)
            assert not thread.is_alive()
            close(during(lambda _: 0.0, eager, x(50 + step), *mine, step), got)
            close(look(*idle), seen[0])
        for a, b in zip((*mine, *idle), (*its, *its_idle), strict=True):
            close(a, b)


# -- where caches hang -----------------------------------------------------------------------------


class Slots:
    __slots__ = ("k", "v")

    def __init__(self, k, v):
        self.k, self.v = k, v


class Private:
    __slots__ = ("__k", "__v")

    def __init__(self, k, v):
        self.__k, self.__v = k, v

    def get(self):
        return self.__k, self.__v


@dataclasses.dataclass
class Data:
    k: torch.Tensor
    v: torch.Tensor


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    k: torch.Tensor
    v: torch.Tensor


class Closed:
    def __init__(self, k, v):
        self.get = lambda: (k, v)


class Bound(nn.Module):
    def __init__(self, k, v):
        super().__init__()
        self.k, self.v = k, v


Named = namedtuple("Named", "k v")


def items(c):
    return c[0], c[1]


def attributes(c):
    return c.k, c.v


# how a session is made, and read
WAYS = {
    "list": (lambda k, v: [k, v], items),
    "slots": (Slots, attributes),
    "private slots": (Private, Private.get),
    "deque": (lambda k, v: deque([k, v], maxlen=2), items),
    "dataclass": (Data, attributes),
    "frozen dataclass": (Frozen, attributes),
    "list subclass": (lambda k, v: KVList([k, v]), items),
    "nested": (lambda k, v: {"layers": [Slots(k, v)]}, lambda c: attributes(c["layers"][0])),
    "module": (Bound, attributes),
    "closure": (Closed, lambda c: c.get()),
}


class By(Attention):
    def __init__(self, get):
        super().__init__()
        self.get = get

    def forward(self, x, caches, step):
        return self.attend(x, *self.get(caches), step)


@pytest.mark.parametrize("way", WAYS)
def test_caches_in_an_argument(way):
    make, get = WAYS[way]
    with torch.no_grad():
        eager, _, compiled = pair(lambda: By(get))
        mine, its = ([make(zeros(), zeros()) for _ in range(2)] for _ in range(2))
        for step in range(14):
            for a, b in zip(mine, its, strict=True):
                close(eager(x(step), a, step), compiled(x(step), b, step))
            if step % 6 == 5:
                close(get(mine[0])[0], get(its[0])[0])
                get(mine[1])[1][:, :, 4:7] *= 0.5
                get(its[1])[1][:, :, 4:7] *= 0.5
        for a, b in zip(mine, its, strict=True):
            close(torch.cat(get(a)), torch.cat(get(b)))
    assert graphs(compiled) == 1
    assert runtime(compiled)["plain_calls"] == 0


HERE = {}


class Around(Attention):
    """Caches of another place than arguments and buffers."""

    def __init__(self, place):
        super().__init__()
        self.place, self.now = place, None

    def set(self, session, side):
        HERE["now" + side], self.side = session, side
        self.now = Slots(*session) if self.place == "attribute" else None
        if self.place == "module":
            self.k, self.v = session

    def forward(self, x, step):
        if self.place == "global":
            return self.attend(x, *HERE["now" + self.side], step)
        if self.place == "module":
            return self.attend(x, self.k, self.v, step)
        return self.attend(x, self.now.k, self.now.v, step)


@pytest.mark.parametrize(
    ("count", "options"), [(1, REPLAY), (2, EAGER)], ids=["one", "two in turns"]
)
@pytest.mark.parametrize("place", ["global", "attribute", "module"])
def test_caches_that_do_not_hang_on_the_arguments(place, count, options):
    with torch.no_grad():
        eager, twin, compiled = pair(lambda: Around(place), options)
        mine, its = sessions(count)
        for step in range(14):
            for a, b in zip(mine, its, strict=True):
                eager.set(a, "eager")
                twin.set(b, "twin")
                close(eager(x(step), step), compiled(x(step), step))
            if step % 6 == 5:
                close(mine[0][0], its[0][0])
                mine[-1][1][:, :, 4:7] *= 0.5
                its[-1][1][:, :, 4:7] *= 0.5
        for a, b in zip(mine, its, strict=True):
            close(torch.cat(a), torch.cat(b))
    assert graphs(compiled) <= 2
    assert runtime(compiled)["plain_calls"] == 0


def test_caches_of_a_closure():
    with torch.no_grad():
        eager, twin, _ = pair(Given)
        mine, its = (zeros(), zeros()), (zeros(), zeros())
        compiled = rtc.compile(lambda x, step: twin(x, *its, step), options=EAGER)
        for step in range(14):
            close(eager(x(step), *mine, step), compiled(x(step), step))
            if step % 6 == 5:
                close(mine[0], its[0])
        close(torch.cat(mine), torch.cat(its))
    assert graphs(compiled) == 1


@pytest.mark.parametrize("options", [EAGER, REPLAY], ids=["eager", "replay"])
def test_two_models_over_the_same_caches_by_different_ways(options):
    """One is given them, to the other they are buffers."""
    with torch.no_grad():
        eager, _, given = pair(Given, options)
        eager2, twin2, held = pair(Window, options)
        k, v, k2, v2 = eager2.k, eager2.v, twin2.k, twin2.v
        for step in range(24):
            if step % 4 in (0, 1):
                close(eager(x(step), k, v, step), given(x(step), k2, v2, step))
            else:
                close(eager2(x(step), step), held(x(step), step))
        same_caches(eager2, twin2)
    assert graphs(given) <= 2
    assert graphs(held) <= 2


@pytest.mark.parametrize(
    "make", [KVList, KVTuple, lambda kv: Named(*kv)], ids=["list", "tuple", "named"]
)
def test_a_sequence_of_guarded_caches(make):
    with torch.no_grad():
        eager, twin, compiled = pair()
        for step in range(15):
            close(eager(x(step), step), compiled(x(step), step))
            if step % 4 == 3:
                mine, its = make([eager.k, eager.v]), make([twin.k, twin.v])
                close(torch.cat(mine), torch.cat(its))
            if step % 4 == 1:
                for kv in (make([eager.k, eager.v]), make([twin.k, twin.v])):
                    torch.stack(kv, out=torch.empty(2, *eager.k.shape).double())
                    torch._foreach_mul_(kv, 0.5)
        same_caches(eager, twin)


# -- tensors that hang on something ----------------------------------------------------------------


class Base:
    __slots__ = ("a",)


class Derived(Base):
    __slots__ = ("b", "unset")


class OneSlot:
    __slots__ = "c"


class Noted(list):
    def __init__(self, values, note):
        super().__init__(values)
        self.note = note


def _reached():
    a, b, c, d = ts = [torch.zeros(1) for _ in range(4)]
    derived, one, data = Derived(), OneSlot(), Data(a, nn.Parameter(b))
    derived.a, derived.b, one.c = a, b, [c]
    loop = {"a": a}
    loop["self"], loop["list"] = loop, [loop, b]
    deep = c
    for _ in range(5000):
        deep = [deep]
    return {
        "a tensor": (a, [a]),
        "containers": ([a, (b, {"c": c, 1: {"d": deque([d])}})], ts),
        "their kin": ([OrderedDict(a=a), defaultdict(list, b=[b]), Named(c, d)], ts),
        "sets": ([{a, b}, frozenset([c])], [a, b, c]),
        "slots": ([derived, one], [a, b, c]),
        "dataclasses": ([data, Frozen(c, d)], [a, data.v, c, d]),
        "a list with attributes": (Noted([a], {"b": b}), [a, b]),
        "cycles": (loop, [a, b]),
        "deep": (deep, [c]),
        "the same twice": ([[a], [a]], [a, a]),
        "no modules": ([nn.Linear(2, 2), {"m": Window()}, a], [a]),
        "no functions and classes": ([lambda: b, Data, torch, _reached, derived.__init__, a], [a]),
        "nothing": ([None, 1, 2.0, "x", b"y", torch.float32, torch.Size([1]), slice(1)], []),
    }


@pytest.mark.parametrize("what", _reached())
def test_tensors_that_hang_on_something(what):
    value, want = _reached()[what]
    assert sorted(map(id, reach.tensors(value))) == sorted(map(id, want))


class Asked(dict):
    """An attribute dict: what it does not have is an error of its own kind."""

    __slots__ = ()
    __getattr__ = dict.__getitem__


class Gone:
    def __init__(self):
        self.of, self.kept = weakref.proxy(Gone.__new__(Gone)), 2.0


@pytest.mark.parametrize("value", [Asked(scale=2.0), Gone()], ids=["attribute dict", "dead proxy"])
def test_objects_that_do_not_like_to_be_asked(value):
    assert [*reach.tensors([value, torch.zeros(1)])] == [torch.zeros(1)]


def test_not_all_of_something_large_is_looked_at():
    kept = torch.zeros(1)
    assert [*reach.tensors([kept] * 50)] == [kept] * 50
    assert [*reach.tensors([[kept] * 50, kept], most=10)] == [kept]
    assert len([*reach.tensors([[kept] * 5 for _ in range(9)], most=20)]) < 20


def test_idle_sessions_on_the_module_are_looked_at_in_a_call():
    """All of them are lifted before the call, as nothing tells which it will be; the others are
    guarded again once the graph's inputs are known."""
    eager, twin = looking(), looking()
    compiled = rtc.compile(twin, options=EAGER)
    mine, its = ([(zeros(), zeros()) for _ in range(2)] for _ in range(2))
    with torch.no_grad():
        for step in range(8):
            for i in range(2):
                outs = []
                for m, call, sessions in ((eager, eager, its), (twin, compiled, mine)):
                    m.k, m.v = sessions[i]
                    IDLE[:] = sessions[1 - i]
                    outs.append(call(x(step), step))
                close(*outs)


IDLE: list[torch.Tensor] = []


@torch.library.custom_op("rtc_tests::with_idle", mutates_args=())
def with_idle(x: torch.Tensor) -> torch.Tensor:
    return x + sum(t[:, :, 4].sum() for t in IDLE)


@with_idle.register_fake
def _(x):
    return torch.empty_like(x)


def looking():
    class Looking(Window):
        def forward(self, x, step):
            return super().forward(with_idle(x), step)

    torch.manual_seed(0)
    return Looking()
