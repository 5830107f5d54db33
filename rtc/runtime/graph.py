"""One graph at run time.

``GraphRuntime`` serves the calls of one compiled graph: it finds or makes the state of each cohort
for the cache tensors at hand, prepares, refreshes, runs, notes, and looks ahead.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from rtc.graphs.step import CaptureError
from rtc.passes.analysis.host import HostProgram, InputInfo, cut
from rtc.passes.analysis.layout import Fallback
from rtc.passes.analysis.tables import Lifted
from rtc.passes.drift import LOOK_AHEAD
from rtc.passes.pipeline import Result
from rtc.passes.rewrite import Extra
from rtc.runtime.constants import ConstEval
from rtc.runtime.owners import OWNERS, keepers, owners, owns, release, take
from rtc.runtime.parts import part_of
from rtc.runtime.prepare import CohortRuntime, Prepared
from rtc.runtime.refresh import Refresher, sent
from rtc.runtime.session import Session
from rtc.runtime.state import CohortState, Handle, Kept, Stamp
from rtc.runtime.step import KEPT, Step
from rtc.runtime.writes import wrote

_REHEARSAL_SECONDS = 1.0
_MISSES = 8  # calls in a row that came otherwise than foreseen, after which nothing is foreseen
_OFTEN = 8  # calibrations, if more than half of the calls
_SMALLEST = 1e-6  # of a calibrated query: heads that were zero in the first call


@dataclass
class Ahead:
    """What the host worked out for a call before it came."""

    ints: dict[fx.Node, int]
    consts: dict[fx.Node, torch.Tensor]
    env: Mapping[fx.Node, Any]
    held: dict[int, tuple[weakref.ref[CohortState], int, Prepared]]  # by cohort
    sent: dict[int, torch.Tensor]

    def fits(self, ints: dict[fx.Node, int], consts: Mapping[fx.Node, torch.Tensor]) -> bool:
        return ints == self.ints and all(consts[n] is t for n, t in self.consts.items())

    def prepared(self, c: CohortRuntime, st: CohortState) -> Prepared | None:
        """The cohort's part, if nothing has happened to its caches since."""
        ref, changes, prep = self.held[c.index]
        return prep if ref() is st and st.changes == changes else None


class GraphRuntime:
    """The compiled callable of one graph.

    ``rewritten(args)`` takes the graph's inputs and then the extras; ``plain(args)`` is the
    untouched graph, for calls that the rewritten one does not fit.
    """

    def __init__(
        self, session: Session, result: Result, inputs: Sequence[InputInfo], gm: fx.GraphModule,
        rewritten: Callable[[list[Any]], Any], plain: Callable[[list[Any]], Any],
        measured: Callable[[list[Any], list[str], list[str]], Any], margin: float,
        refresher: Refresher,
    ) -> None:  # fmt: skip
        self.refresher = refresher
        self.measured, self.margin = measured, margin
        self.session, self.inputs = session, list(inputs)
        self.rewritten, self.plain = rewritten, plain
        self.plan = plan = result.plan
        self.extras = result.rewritten.extras
        self.scale_nodes = result.rewritten.scales
        self.scales: dict[int, list[torch.Tensor] | None] = {}  # by cohort, as last taken
        self.lifted = [Lifted(plan.host, n) for n in result.rewritten.lifted]
        self.ints = result.rewritten.ints
        self.varying = [(i, e) for i, e in enumerate(self.extras) if e.kind not in KEPT]
        self.step: Step | None = None  # replays steps, where that is wanted
        self.alarm: Any = None  # looks, without waiting, whether ranks still meet
        self.ahead: Ahead | None = None
        self.misses = 0  # calls in a row that were not prepared ahead
        self.last_ints: dict[fx.Node, int] = {}
        self.cohorts = [
            CohortRuntime(i, c, self.extras, plan.host)
            for i, c in enumerate(plan.cohorts)
            if c.order != "plain"
        ]
        # of each cohort's caches: the numbers of the user's tensors, and the state last found
        self.behind = {c.index: [self._user(i) for i in c.inputs] for c in self.cohorts}
        self.found: dict[int, weakref.ref[CohortState]] = {}
        self.parts = [i for i in self.inputs if i.part is not None]
        self.host = self._program(tables=True)
        self.verified = self.rehearsed = False
        self.const = ConstEval({i.node: i for i in inputs}, lambda n: getattr(gm, n))
        self.const_inputs = self._const_inputs()
        self._cpu: dict[int, tuple[Stamp, torch.Tensor]] = {}
        managed = {h for c in self.cohorts for h in c.inputs}
        gm = result.rewritten.gm
        assert gm is not None
        places = [n for n in gm.graph.nodes if n.op == "placeholder"]
        # used as they are, so they must lie in order: by the device, or by the host alone
        self.others = [
            i for i in inputs
            if not i.is_int and i.index not in managed
            and (i.node.users or places[i.index].users)
        ]  # fmt: skip
        self.mutated = [i for i in self.inputs if i.mutated]

    def _program(self, *, tables: bool = False) -> HostProgram:
        """What the host works out in each call; ``tables``: whole tables too, to check keys."""
        roots = set(self.ints.values())
        for value in self.lifted:
            roots |= value.nodes | ({value.node} if tables else set())
        for c in self.cohorts:
            roots |= self.plan.host_roots(c.cohort)
            for r in c.readers:
                roots |= r.nodes | ({n for n, _ in r.operand.entries} if tables else set())
        return HostProgram(self.plan.host, roots)

    def _const_inputs(self) -> list[InputInfo]:
        """Constant inputs that enter views: when one changes, the views are out of date."""
        found: set[fx.Node] = set()
        stack = [
            o.node for c in self.cohorts for v in c.cohort.views for o in v.fn.operands()
            if o.role == "const"
        ]  # fmt: skip
        while stack:
            node = stack.pop()
            if node not in found:
                found.add(node)
                stack.extend(node.all_input_nodes)
        return [i for i in self.inputs if i.node in found]

    # -- a call --------------------------------------------------------------------------------

    def __call__(self, args: list[Any]) -> Any:
        """``args``: the graph's inputs in order (boxed: the list is emptied)."""
        args_in = list(args)
        args.clear()
        try:
            return self._call(args_in)
        except BaseException:
            # AOT's wrapper counted the versions up before: nobody else wrote
            touched = self.session.touched
            touched += [st for st in keepers(args_in) if st not in touched]
            raise
        finally:
            self.const.args = ()  # a freed cache must not be kept alive
            wrote(args_in[self._user(i.index)] for i in self.mutated)

    def _call(self, args_in: list[Any]) -> Any:
        states: list[tuple[CohortRuntime, CohortState, Prepared]] = []
        try:
            for i in self.others if OWNERS else ():
                t = args_in[i.index if i.parent is None else i.parent.index]
                for st in owners(t) if id(t) in OWNERS else ():
                    if any(Handle(t, i.part).overlaps(h) for h in st.handles):
                        st.materialize()
                        st.dirty |= i.mutated and t.is_inference()  # it counts no version
            args_in += [_cut(args_in[i.parent.index], i.part) for i in self.parts]  # type: ignore[union-attr]
            ints = {i.node: int(args_in[i.index]) for i in self.host.int_inputs}
            consts = self._consts(args_in)
            ahead, self.ahead = self.ahead, None
            if ahead is not None and not ahead.fits(ints, consts):
                ahead = None
            env = self._env(ints, consts) if ahead is None else ahead.env
            memo: dict[Any, Any] = {}
            self.const.args = args_in
            stamps = self._stamps(args_in)
            tables = {i.source: self._cpu[i.index][0] for i in self.host.const_inputs}
            for c in self.cohorts:
                st = self._state(c, args_in)
                st.check_consts(stamps)
                st.check_tables(tables)
                if not self._calibrated(c, st):
                    return self._calibrate(args_in)
                prep = None if ahead is None else ahead.prepared(c, st)
                if prep is None:
                    ahead, prep = None, c.prepare(st, env, memo)
                states.append((c, st, prep))
        except Fallback as e:
            return self._run_plain(args_in, str(e))
        self._know_scales(states)
        try:
            for c, st, prep in states:
                self._refresh(c, st, prep, args_in)
            out = self._run(args_in, states, (env, memo), ahead)
            if self.ints:
                out = [env[self.ints[i]] if i in self.ints else x for i, x in enumerate(out)]
        except BaseException:
            for _, st, _ in states:
                self._broken(st)
            raise
        try:
            self._finish(states)
        except BaseException:  # Ctrl-C: the caches are written, so it must be known where
            self._finish(states)
            raise
        if self.alarm is not None:
            self.alarm.look()
        if not self.rehearsed:
            self._rehearse(args_in, states, consts)
        self._look_ahead(ints, consts, states)
        return out

    def _know_scales(self, states: list[tuple[CohortRuntime, CohortState, Prepared]]) -> None:
        """Let constant expressions take the scales of these states."""
        now = {c.index: st.scales for c, st, _ in states}
        if now.keys() == self.scales.keys() and all(now[i] is x for i, x in self.scales.items()):
            return
        self.const.scales = {
            n: scales[e.operand]
            for n, e in self.scale_nodes.items()
            if (scales := now.get(e.cohort)) is not None
        }
        self.scales = now  # last: after a Ctrl-C before it, the next call does this again

    def _finish(self, states: list[tuple[CohortRuntime, CohortState, Prepared]]) -> None:
        """Note that the call ran; twice does no harm."""
        self.session.plain_in_a_row = 0
        for c, st, prep in states:
            c.finish(st, prep)
            self.session.touched.append(st)

    def _look_ahead(
        self, ints: dict[fx.Node, int], consts: Mapping[fx.Node, torch.Tensor], states: list[Any]
    ) -> None:
        """The host's share of the next call, while the device runs this one.

        Ints are taken to go on as they went from the last call to this one; the next call looks
        whether they did, and whether anything else happened to the caches.
        """
        last, self.last_ints = self.last_ints, ints
        if self.step is None or self.session.write_back or last.keys() != ints.keys():
            return
        if self.misses >= _MISSES:
            return
        coming = {n: x + (x - last[n]) for n, x in ints.items()}
        # the coming call may not fit, or not come; if it does, it says so itself
        with contextlib.suppress(Exception), _one_thread():
            env, memo = self.host.run(coming, consts), {}  # type: ignore[var-annotated]
            preps = [(c, st, c.prepare(st, env, memo)) for c, st, _ in states]
            sent = {i: self._extra(e, preps, env, memo) for i, e in self.varying}
            held = {c.index: (weakref.ref(st), st.changes, prep) for c, st, prep in preps}
            self.step.foresee(states[0][1].steps, sent)
            self.ahead = Ahead(coming, dict(consts), env, held, sent)

    def _rehearse(
        self, args: list[Any], states: list[Any], consts: Mapping[fx.Node, torch.Tensor]
    ) -> None:
        """After the first call, which took long anyway; every int goes on by one a call."""
        self.rehearsed = True
        ints = {i.node: int(args[i.index]) for i in self.host.int_inputs}
        by = {i.node: int(i.counts) for i in self.host.int_inputs}

        def host(t: int) -> Mapping[fx.Node, Any]:
            return self.host.run({n: x + t * by[n] for n, x in ints.items()}, consts)

        # ints that go another way in truth may lead anywhere
        with contextlib.suppress(Exception):
            for c, st, _ in states:
                coming = c.rehearse(st, host, LOOK_AHEAD, _REHEARSAL_SECONDS)
                for refreshes in coming:
                    parts = [part_of(c, st, r, src) for r, src in refreshes]
                    self.refresher.expect(st, parts, self.const, self._const_args(args))

    def _run(
        self, args: list[Any], states: list[Any],
        host: tuple[Mapping[fx.Node, Any], dict[Any, Any]], ahead: Ahead | None,
    ) -> Any:  # fmt: skip
        """``host``: this call's values, and what was worked out from them."""
        env, memo = host
        kept = [self._kept(c, st) for c, st, _ in states]
        extras: list[Any] = list(kept[0].row)
        for k in kept[1:]:
            for i, value in k.values.items():
                extras[i] = value
        self.session.counters.prepared_ahead += ahead is not None
        self.misses = 0 if ahead is not None else self.misses + 1
        for i, e in self.varying:
            extras[i] = self._extra(e, states, env, memo) if ahead is None else ahead.sent[i]
        if self.step is not None and not self.step.blockers:
            owner = states[0][1].steps
            try:
                marks = [k.mark for k in kept]
                return self.step(owner, args, extras, marks, self.session.counters)
            except CaptureError as e:
                self.session.note(f"steps run without a CUDA graph: {e}")
                self.step = None
        return self.rewritten([*args, *(self._sent(x, args) for x in extras)])

    def _kept(self, c: CohortRuntime, st: CohortState) -> Kept:
        """Inputs of one cohort that lie on its device from call to call."""
        # by cohort: caches that two cohorts lay out alike may change places between calls
        kept = st.kept.setdefault(self, {})
        have = kept.get(c.index)
        sizes = self._sizes(c, st)
        now = (st.scales, sizes)
        if have is None or any(a is not b for a, b in zip(have.scales, now, strict=True)):
            scales = [*(st.scales or ()), *(sizes or ())]
            values: dict[int, torch.Tensor] = {}
            for i, e in enumerate(self.extras):
                if e.kind in KEPT and e.cohort == c.index:
                    if e.kind == "view":
                        values[i] = st.storages[e.view]
                    elif e.kind == "scale":
                        values[i] = scales[e.operand]
                    else:
                        values[i] = st.saturated
            have = kept[c.index] = Kept(now, values, len(self.extras))
        return have

    def _sent(self, value: torch.Tensor, args: list[Any]) -> torch.Tensor:
        device = args[self.cohorts[0].inputs[0]].device
        return value if value.device == device else sent(value, device)

    def _sizes(self, c: CohortRuntime, st: CohortState) -> list[torch.Tensor] | None:
        """The measured sizes of this graph's queries; None: not measured."""
        return st.queries.get(self, {}).get(c.index)

    def _calibrated(self, c: CohortRuntime, st: CohortState) -> bool:
        if c.queries and self._sizes(c, st) is None:
            return False
        return st.scales is not None or not (c.scales or c.queries)

    def _calibrate(self, args: list[Any]) -> Any:
        """The first call of a session: the plain graph, its whole-cache maxima noted. So does the
        first one of another graph, for its queries: the caches' scales stay as they are."""
        self.session.note("scales were calibrated in the first call of each session")
        self.session.calibrations += 1
        if (
            self.session.calibrations >= _OFTEN
            and 2 * self.session.calibrations > self.session.calls
        ):
            self.session.note(
                "most calls measure scales, op by op: sessions are of one call, or graphs take "
                "turns over one cache and scale it otherwise (each drops what the other has made)"
            )
        pairs = []
        for c in self.cohorts:
            st = self._state(c, args)
            st.materialize()
            pairs.append((c, st))
        nodes = [n for c, _ in pairs for n in c.scales]
        queries = [n for c, _ in pairs for n in c.queries]
        out, found = self.measured(args, [n.name for n in nodes], [n.name for n in queries])
        for c, st in pairs:
            scales, others = st.scales, dict(st.queries)
            st.invalidate()
            self.session.touched.append(st)
            got = [found[n.name] for n in c.scales]
            # turning pairs of features may enlarge the largest by the root of two
            sizes = [found[n.name].clamp(min=_SMALLEST) * 2**0.5 for n in c.queries]
            if scales is not None:
                st.scales = scales
                st.queries.update(others)
            # zeros calibrate nothing: a session that starts empty is measured again
            elif all(bool((v > 0).all()) for v in got):
                st.scales = [v * self.margin for v in got]
            if st.scales is not None and c.queries and self._sizes(c, st) is None:
                st.queries.setdefault(self, {})[c.index] = [v * self.margin for v in sizes]
        return out

    def _broken(self, st: CohortState) -> None:
        """A call died half way: caches may be half written, as in eager; the views are dropped."""
        st.drop_views()
        self.session.touched.append(st)

    def _run_plain(self, args: list[Any], reason: str) -> Any:
        self.session.plain_calls += 1
        self.session.plain_in_a_row += 1
        self.session.note(f"a call took the plain path: {reason}")
        for c in self.cohorts:
            for i in c.inputs:
                for st in owners(args[self._user(i)]):
                    st.materialize()
                    st.invalidate()
                    if st not in self.session.touched:
                        self.session.touched.append(st)
        return self.plain(args[: len(self.inputs) - len(self.parts)])

    def _user(self, index: int) -> int:
        """The number of the user's tensor behind an input."""
        info = self.inputs[index]
        return info.index if info.parent is None else info.parent.index

    def _consts(self, args: list[Any]) -> dict[fx.Node, torch.Tensor]:
        """Constant inputs of the host's program, as CPU tensors."""
        consts: dict[fx.Node, torch.Tensor] = {}
        for i in self.host.const_inputs:
            t = args[i.index]
            stamp = Stamp(t, self.session.epoch)
            have = self._cpu.get(i.index)
            if have is None or not have[0].same(stamp):
                # one device-to-host copy when a table of the module is first seen, or has changed
                have = self._cpu[i.index] = (stamp, t.detach().cpu().clone())
                for c in self.cohorts:
                    c.compared.clear()
            consts[i.node] = have[1]
        return consts

    def _env(
        self, ints: Mapping[fx.Node, int], consts: Mapping[fx.Node, torch.Tensor]
    ) -> dict[fx.Node, Any]:
        env = self.host.run(ints, consts)
        if not self.verified:
            for c in self.cohorts:
                c.verify(env)
            for value in self.lifted:
                value.verify(env)
            self.host, self.verified = self._program(), True
        return env

    def _stamps(self, args: list[Any]) -> list[Stamp]:
        return [Stamp(t, self.session.epoch) for t in self._const_args(args)]

    def _state(self, c: CohortRuntime, args: list[Any]) -> CohortState:
        behind = [args[i] for i in self.behind[c.index]]
        ref = self.found.get(c.index)
        st = None if ref is None else ref()
        if st is None or st.released or not st.lies_on(behind):
            st = self._find_or_make(c, args, behind)
            self.found[c.index] = weakref.ref(st)
        if st not in self.session.states:  # another compiled model made it
            self.session.states.append(st)
        return st

    def _find_or_make(
        self, c: CohortRuntime, args: list[Any], behind: list[torch.Tensor]
    ) -> CohortState:
        handles = [Handle(t, self.inputs[i].part) for t, i in zip(behind, c.inputs, strict=True)]
        ids = tuple(h.key for h in handles)
        users = list({id(t): t for t in behind}.values())
        for t in users:
            for st in owners(t):
                if st.ids == ids and st.key == c.key:
                    return st
        for t, h in zip(behind, handles, strict=True):
            for st in owners(t):
                if any(h.overlaps(other) for other in st.handles):
                    self.session.undone = True
                    release(st)
        for i in c.inputs:
            if len(c.cohort.caches[0].dims) > 1 and not args[i].is_contiguous():
                raise Fallback("a cache with several slot axes is not contiguous")
        st = CohortState(c.key, c.cohort, handles, self.session.counters)
        st.write_back, st.watched = self.session.write_back, self.session.watches
        st.record_versions()
        take(st, users)
        self.session.uses(st)
        self.session.states = [s for s in self.session.states if owns(s)]
        return st

    def _refresh(self, c: CohortRuntime, st: CohortState, prep: Prepared, args: list[Any]) -> None:
        if not prep.refresh:
            return
        parts = []
        for r in prep.refresh:
            src = st.place.find(r.cids)
            assert (src >= 0).all(), "a slot to refresh is not in the cache"
            parts.append(part_of(c, st, r, src))
            st.counters.refreshed_slots += len(r.cids)
        with torch.no_grad():
            self.refresher.run(st, parts, self.const, self._const_args(args))

    def _const_args(self, args: list[Any]) -> list[torch.Tensor]:
        tensors = (args[i.index] for i in self.const_inputs)
        return [t for t in tensors if isinstance(t, torch.Tensor)]

    def _extra(
        self, e: Extra, states: list[Any], env: Mapping[fx.Node, Any], memo: dict[Any, Any]
    ) -> torch.Tensor:
        """The value of a new input that the host works out in every call."""
        if e.kind == "host":
            value = self.lifted[e.operand].value(env, memo)
            return value.to(e.dtype).reshape(e.shape).contiguous()
        prep: Prepared = next(s[2] for s in states if s[0].index == e.cohort)
        return prep.extras[e]


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Tables of new rows are small: to wake other threads for them takes longer than the work."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _cut(tensor: torch.Tensor, part: tuple[int, int, int] | None) -> torch.Tensor:
    assert part is not None
    return cut(tensor, part)
