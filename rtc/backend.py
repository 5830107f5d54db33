"""From Dynamo's graph to a compiled callable.

Dynamo graph -> SDPA as one opaque op -> AOTAutograd (functional ATen, mutation as a copy_ epilogue)
-> rtc's passes -> Inductor (or ATen, op by op) -> runtime wrapper (state, positions).
"""

from __future__ import annotations

import dataclasses
import gc
import importlib.util
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch._functorch.aot_autograd import aot_module_simplified
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from rtc import (
    attention_calls,
    constants,
    dtensor,
    exchanges,
    for_inductor,
    identities,
    layers,
    reals,
    refused,
    region_ops,
    regions,
    siblings,
)  # fmt: skip
from rtc.errors import OptionsError, UnsupportedError
from rtc.host_numbers import HostNumbers
from rtc.inputs import described, guarded_tensors, named, parts, shared_ints, traced_code
from rtc.options import Options
from rtc.passes import pipeline
from rtc.passes.analysis.fn import LAYOUT
from rtc.passes.analysis.host import InputInfo
from rtc.passes.analysis.shapes import hint
from rtc.passes.analysis.slots import COPIES
from rtc.passes.base import IllegalCombination
from rtc.passes.rewrite import copied
from rtc.ranks import Ranks
from rtc.report import GraphReport
from rtc.runtime.constants import WithConstants
from rtc.runtime.graph import GraphRuntime
from rtc.runtime.owners import OWNERS, guard_all, owners
from rtc.runtime.refresh import Refresher
from rtc.runtime.session import Session
from rtc.runtime.step import Step
from rtc.runtime.writes import wrote
from rtc.settle import Settling, Sizes, Watch

aten = torch.ops.aten


class Specialize(Exception):
    """Ask for another trace in which sizes of caches are constants: ``Compiler.fixed`` or
    ``Compiler.static`` say which."""

    def __init__(self, names: Iterable[str]) -> None:
        super().__init__(f"sizes of caches depend on {', '.join(names)}")


# A window that fills has a graph for each length; beyond so many, lengths stay symbolic.
_STATIC_GRAPHS = 16
_SETTLED = 4  # sets of sizes that have settled; what settles after them stays symbolic
GRAPHS = 64  # of one model, since it was last traced anew
TOO_MANY = (
    f"the model was compiled for {GRAPHS} values of something that changes from call to call: a "
    "float or a string among the arguments, a number made from the step, an attribute. "
    "TORCH_LOGS=recompiles names it. Pass it as a tensor, or as an int argument that only indexes "
    "and adds."
)


@dataclass(repr=False, eq=False)  # Dynamo's messages print the backend, and it asks which it is
class Compiler:
    """Compiles graphs for one session; ``graphs`` collects what was done for the report."""

    options: Options
    session: Session
    graphs: list[GraphReport] = field(default_factory=list)
    on_phase: Callable[[str], None] = lambda name: None
    dry: bool = False  # explain: decide, but do not compile
    # ints that may be made constant (source -> value); None: nobody would trace again
    fixed: dict[str, set[int]] | None = None
    # set while a graph is traced again with constant tensor sizes: the ints that stay symbolic
    static: tuple[str, ...] | None = None
    ranks: Ranks = field(default_factory=Ranks)  # the others that run this model's collectives
    called: float | None = None  # when the call began that may compile, by time.perf_counter()
    settled: list[tuple[int, ...]] = field(default_factory=list)  # sizes of graphs, see settle
    stale: bool = False  # a ring was found that other graphs should know of: trace again
    since: int = 0  # graphs that were there when the model was last traced anew
    patient: bool = True  # graphs whose sizes may yet settle run op by op until they have
    # sources of caches that one of the graphs keeps in a ring, and of those that one leaves alone
    rings: set[str] = field(default_factory=set)
    still: set[str] = field(default_factory=set)
    numbers: HostNumbers = field(default_factory=HostNumbers)
    # ints of globals, which Dynamo takes for constants: values seen, and those that changed
    shared: dict[str, int] = field(default_factory=dict)
    moving: set[str] = field(default_factory=set)
    apart: set[str] = field(default_factory=set)  # ints of layers that differ, see siblings
    codes: Collection[Any] = ()  # of the model's own forward
    quiet: Uncollected = field(default_factory=lambda: Uncollected())

    def __post_init__(self) -> None:
        self.settling = Settling(self._settles)  # of the graphs since the model was traced anew

    def __call__(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        """The Dynamo backend."""
        before = len(self.graphs)
        try:
            with self.numbers.traced():
                return self._backend(gm, example_inputs)
        except BaseException:
            del self.graphs[before:]  # nothing came of it
            raise

    def _backend(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        if torch.is_grad_enabled() and any(
            isinstance(x, torch.Tensor) and x.requires_grad for x in example_inputs
        ):
            raise UnsupportedError(
                "rtc compiles for inference: call the model under torch.no_grad() or "
                "torch.inference_mode()"
            )
        if len(self.graphs) - self.since >= GRAPHS:
            raise UnsupportedError(TOO_MANY)
        report = GraphReport(name=f"graph {len(self.graphs)}")
        self.graphs.append(report)
        if self.called is not None:
            report.starts(self.called)
            report.ends("dynamo")
        self._follow(shared_ints())
        if OWNERS:
            self.session.looks_at(guarded_tensors())
        refused.host_reads(gm)
        refused.lost_writes(gm)
        identities.take_out(gm)
        siblings.unite(gm, self.apart)
        attention_calls.hide(gm)
        dtensor.prepare(gm)
        places = [n for n in gm.graph.nodes if n.op == "placeholder"]
        sources = [s for n in places for s in parts(*named(n))]
        self.on_phase("tracing")

        def inner(functional: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
            report.ends("tracing")
            return self._compile(functional, inputs, sources, report)

        alone = not self.quiet.large  # else the call goes on as it is
        self.quiet.start()
        try:
            with torch._inductor.config.patch(fallback_random=True):  # unused draws stay
                compiled, whole = layers.traced(gm, example_inputs, inner, _aot)
        finally:
            if alone:
                self.quiet.end()
        report.whole = whole
        report.ends("runtime")
        session, first = self.session, True
        aside = bool(self.codes) and traced_code() not in self.codes
        wrapped = [i for i, x in enumerate(example_inputs) if is_traceable_wrapper_subclass(x)]
        single = [i for i, x in enumerate(example_inputs) if _single(x)]

        def run(*args: Any) -> Any:
            # a cache may be what a wrapper holds: writes to it are counted there
            nonlocal first
            if first:
                report.ends("guards")
            self.numbers.also(args[i] for i in single)
            held = [t for i in wrapped for _, t, _ in parts("", args[i])]
            session.before_graph([*args, *held] if held else args, aside)
            try:
                return compiled(*args)
            finally:
                session.after_graph()
                if first:
                    first = False
                    report.ends("first run")
                if session.write_back:
                    guard_all(session.note, session.states)

        return run

    def _compile(
        self, gm: fx.GraphModule, fakes: Sequence[Any], sources: list[Any], report: GraphReport
    ) -> Callable[..., Any]:
        inputs = described(gm, sources)
        sample = {i.node: hint(i.node.meta["val"]) for i in inputs if i.is_int}
        self._specialize(inputs, sample)
        watch = self._settle(gm, inputs, report)
        fakes = [i.node.meta["val"] for i in inputs]
        report.ends("passes")
        parties = [] if self.dry else self.ranks.join(gm, self.options)
        if parties:
            report.ends("ranks")
        if watch is not None:
            # with other ranks the model is not traced again
            watch.waits &= not parties and self.ranks.dog is None
        plain = copied(gm)
        report.before(gm, inputs)
        try:
            result = pipeline.run(
                gm,
                inputs,
                sample,
                self.options.switches(),
                calibrate=self.options.quantize == "calibrated",
                write_back=self.options.write_back,
                kernels=self._own_kernels(inputs),
                lift=self._step_graph(inputs) or self._wants_regions(inputs),
                rings=self.rings,
                on_pass=self.on_phase,
            )
        except IllegalCombination as e:
            raise OptionsError(str(e)) from None
        assert result.rewritten.gm is not None
        new = result.rewritten.gm
        managed = any(c.order != "plain" for c in result.plan.cohorts)
        self._turns(result)
        whole = self._whole(new, inputs)
        if whole is not None and exchanges.fused(new):
            why = f"Inductor would not keep the order of sums: {whole}"
            exchanges.undo(new, result.outcomes, why)
        report.after(new, result)
        report.ends("passes")
        if self.dry:
            return make_boxed_func(plain.forward)
        self.ranks.agree(parties, self.options, inputs, sample, plain, new)
        exchanges.alike([plain, result.traced], new, result.outcomes)
        report.notes += exchanges.prepare(new)
        exchanges.settle([plain, result.traced], new, result.outcomes)
        if parties:
            report.ends("ranks")
        self.quiet.only_new()
        self.on_phase("code generation")
        if not managed:
            fused = any(o.applied for p, _, o in result.outcomes.values() if p.stage == "graph")
            if watch is not None and watch.waits:
                run = _op_by_op(new if fused else plain)
                report.notes.append("runs op by op until its sizes have settled")
            else:
                run = self._lower(new if fused else plain, list(fakes), report)
            report.ends(self.options.lowering)
            return _watched(_owned(run, inputs, self.session), watch)
        if watch is not None:
            watch.waits = False
        cuts = [i.node.meta["val"] for i in result.inputs[len(inputs) :]]
        extras = [n.meta["val"] for n in result.rewritten.nodes]
        first = len(fakes) + len(cuts)
        constant = [i.index for i in inputs if i.parameter and not i.mutated] + [
            first + j for j, e in enumerate(result.rewritten.extras) if e.kind == "scale"
        ]
        loose = exchanges.unordered(new) if whole is not None else []
        if loose:
            why = f"Inductor would not keep {loose[0]} in its place: {whole}"
            report.notes.append(f"runs op by op: {why}")
            attention_calls.show(new)
            run = _boxed(new)
        else:
            run = self._lower(new, [*fakes, *cuts, *extras], report, constant)
        report.ends(self.options.lowering)
        lowered: list[Callable[..., Any]] = []

        def fallback(args: list[Any]) -> Any:
            # the untouched graph, op by op: rare calls only, so it is not worth a compile
            if not lowered:
                lowered.append(_op_by_op(plain))
            return lowered[0](args)

        def measured(
            args: list[Any], names: list[str], queries: list[str]
        ) -> tuple[Any, dict[str, torch.Tensor]]:
            """The graph as traced; values of some nodes, and largest sizes a head of others."""
            whole = result.traced or plain
            attention_calls.show(whole)
            regions.early_writes(whole)
            watch = _Watch(whole, set(names), set(queries))
            taken = sum(n.op == "placeholder" for n in whole.graph.nodes)
            return watch.run(*args[:taken]), watch.seen

        runtime = GraphRuntime(
            self.session, result, result.inputs, gm, run, fallback, measured,
            self.options.calibration_margin, self._refresher(inputs),
        )  # fmt: skip
        if exchanges.fused(new) and self._cuda(inputs):
            runtime.alarm = exchanges.Alarm(new)
        if self._step_graph(inputs):
            runtime.step = Step(runtime.rewritten, result, runtime.inputs)
            report.notes += runtime.step.blockers
        runtime._boxed_call = True  # type: ignore[attr-defined]
        exchanges.meet(new)
        return _watched(runtime, watch)

    def _step_graph(self, inputs: list[InputInfo]) -> bool:
        """Whether steps are to be replayed from a captured graph."""
        if self.options.step_graph == "auto":
            return self._cuda(inputs)
        return self.options.step_graph == "simulate"

    @staticmethod
    def _cuda(inputs: list[InputInfo]) -> bool:
        vals = [i.node.meta["val"] for i in inputs]
        return any(isinstance(v, torch.Tensor) and v.device.type == "cuda" for v in vals)

    def _specialize(self, inputs: list[InputInfo], sample: dict[fx.Node, int]) -> None:
        """Raise Specialize for ints that fix sizes around a cache, the first time they are seen.

        An int that was constant once and came back with another value stays symbolic.
        """
        if self.fixed is None:
            return
        growing = [i.source for i in inputs if _grows(i)]
        if growing and self.static is None and len(self.graphs) <= _STATIC_GRAPHS:
            self.static = tuple(i.source for i in inputs if i.is_int and "()" not in i.source)
            raise Specialize(growing)
        symbols: set[Any] = set()
        for info in inputs:
            if info.mutated:
                symbols |= _sizes_below(info.node)
        values = {
            i.source: sample[i.node]
            for i in inputs
            if i.is_int and _symbols(i.node.meta["val"]) & symbols and not self.fixed.get(i.source)
        }
        if values:
            for name, value in values.items():
                self.fixed[name] = {value}
            raise Specialize(values)

    def _turns(self, result: pipeline.Result) -> None:
        """Graphs that take turns over a cache lay it out alike, or each undoes the other's: trace
        again if one that was left alone might be in a ring, as it is in this one."""
        known = set(self.rings)
        for cohort in result.plan.cohorts:
            sources = {c.info.source for c in cohort.caches}
            if cohort.order == "ring":
                self.rings |= sources
            elif cohort.order == "plain" and cohort.events:
                self.still |= sources - known  # else it was asked already
        # with other ranks, which may not see the same and would not come to compile, it stays
        if self.rings & self.still and self.fixed is not None and self.ranks.dog is None:
            self.still -= self.rings
            self.stale = True

    def _follow(self, ints: dict[str, int]) -> None:
        """Raise Specialize for ints of globals that are others than in an earlier trace."""
        moved = {name for name, x in ints.items() if self.shared.setdefault(name, x) != x}
        if self.fixed is not None and not moved <= self.moving:
            self.moving |= moved
            raise Specialize(moved)

    def _settle(
        self, gm: fx.GraphModule, inputs: list[InputInfo], report: GraphReport
    ) -> Watch | None:
        """Hold sizes that are known to have settled as constants; watch those that may yet."""
        sizes = Sizes(gm) if self.fixed is not None else None
        if not sizes:
            return None
        if sizes.hints in self.settled:
            sizes.fix()
            held = [f"{expr} = {n}" for expr, n in sizes.known.items()]
            more = [f"{len(held) - 3} more"] if len(held) > 3 else []
            named = ", ".join([*held[:3], *more])
            report.notes.append(f"sizes that have settled are constants: {named}")
            return None
        sizes.differ_from(self.settled)
        if self.dry or len(self.settled) >= _SETTLED:
            return None
        places = [n for n in gm.graph.nodes if n.op == "placeholder"]
        watch = Watch(sizes, places, self.settling)
        # where no int of the program goes on, nothing will settle: a prompt's length, say
        goes_on = any(inputs[i].counts for i in watch.ints or ())
        watch.waits = goes_on and self.patient and self.options.lowering != "eager"
        self.settling.watches.append(watch)
        return watch

    def _settles(self, sizes: tuple[int, ...]) -> bool:
        # with other ranks, which may not see the same and would not come to compile, it stays
        new = sizes not in self.settled and len(self.settled) < _SETTLED
        if new and self.ranks.dog is None:
            self.settled.append(sizes)
        return new and self.ranks.dog is None

    def _refresher(self, inputs: list[InputInfo]) -> Refresher:
        """On a GPU, coming refreshes are compiled and captured ahead."""
        on = self._cuda(inputs) and self.options.lowering == "inductor"
        simulated = self.options.step_graph == "simulate"
        lower = self._lower_one if on or simulated else None
        return Refresher(lower, capture=self._step_graph(inputs))

    def _own_kernels(self, inputs: list[InputInfo]) -> bool:
        if self.options.kernels != "auto":
            return self.options.kernels == "on"
        return self._cuda(inputs) and importlib.util.find_spec("triton") is not None

    def _wants_regions(self, inputs: list[InputInfo]) -> bool:
        """Whether alike parts are compiled once: where a CUDA graph replays what the host does
        between them. Else it costs some 30 us a region: 47 against 34 ms a step of the deep preset
        on two cores, which then compiles in 35 s instead of 71."""
        if self.options.regions != "auto":
            return self.options.regions == "on"
        return self._cuda(inputs) and self.options.lowering != "eager"

    def _whole(self, gm: fx.GraphModule, inputs: list[InputInfo]) -> str | None:
        """Why Inductor is given the graph as a whole, and may order it as it likes; or None."""
        if self.options.lowering == "eager":
            return None
        if not self._wants_regions(inputs):
            return "regions are off"
        return region_ops.obstacle(gm)

    def _lower(
        self, gm: fx.GraphModule, fakes: list[Any], report: GraphReport,
        constant: Sequence[int] = (),
    ) -> Callable[..., Any]:  # fmt: skip
        """``constant``: numbers of the inputs that stay as they are for a session."""
        inputs = described(gm, [])
        if self.options.lowering != "eager":
            reals.spell(gm)  # before it is cut: what passes from part to part is real then
        if self._wants_regions(inputs):
            why = region_ops.obstacle(gm)
            if why is None:
                split = constants.split(gm, constant)
                program, cut = regions.cut(split.main if split else gm, self._lower_one)
                report.regions = dataclasses.asdict(cut)
                if split is None:
                    return program
                make, _ = regions.cut(split.constants, self._lower_one)
                report.regions["constants"] = len(split.fakes)
                return WithConstants(program, make, split.where, lambda: self.session.epoch)
            report.notes.append(f"compiled as a whole: {why}")
        attention_calls.show(gm)
        return self._lower_one(gm, fakes)

    def _lower_one(self, gm: fx.GraphModule, fakes: list[Any]) -> Callable[..., Any]:
        if self.options.lowering == "eager":
            return _boxed(gm)
        from torch._inductor.compile_fx import compile_fx

        reals.spell(gm)
        for_inductor.spell(gm)
        given = {**for_inductor.settings(gm), **dict(self.options.inductor)}
        with torch._inductor.config.patch(given):
            fn = compile_fx(gm, fakes)
        return lambda args: fn(*args)


def _aot(gm: fx.GraphModule, inputs: list[Any], inner: Callable[..., Any]) -> Any:
    return aot_module_simplified(
        gm,
        inputs,
        fw_compiler=inner,
        inference_compiler=inner,
        decompositions={},
        keep_inference_input_mutations=True,
    )


def _watched(run: Callable[[list[Any]], Any], watch: Watch | None) -> Callable[[list[Any]], Any]:
    if watch is None:
        return run

    def call(args: list[Any]) -> Any:
        watch.see(args)
        return run(args)

    call._boxed_call = True  # type: ignore[attr-defined]
    return call


def _op_by_op(gm: fx.GraphModule) -> Callable[..., Any]:
    attention_calls.show(gm)
    return _boxed(regions.early_writes(gm))


def _boxed(gm: fx.GraphModule) -> Callable[..., Any]:
    """Runs a graph op by op; its code is made now, not in every call's way."""
    _LazyGraphModule.force_recompile(gm)
    return make_boxed_func(gm.forward)


class Uncollected:
    """No collections of cyclic garbage: a traced model is millions of objects, all of them alive,
    and to walk them again and again took 8 of 53 s of a first call (60 layers in 4 denoising
    passes, narrow ones, on a CPU), without Dynamo's."""

    on = False  # it was, and will be again
    large = False
    frozen = False

    def start(self, *, large: bool = False) -> None:
        """``large``: much is to come, so that what is garbage already is collected now."""
        if gc.isenabled():
            self.on = True
            if large:
                gc.collect()
                self.large = True
            gc.disable()

    def only_new(self) -> None:
        """From here on, collect what is made from here on; of a large model only that, until the
        end: code is tried out on the device, which needs its memory."""
        if self.large and not gc.get_freeze_count():  # else the program has a use for it
            gc.freeze()
            self.frozen = True
        self._again()

    def end(self) -> None:
        if self.frozen:
            self.frozen = False
            gc.unfreeze()
        self.large = False
        self._again()

    def _again(self) -> None:
        if self.on:
            self.on = False
            gc.enable()


class _Watch(fx.Interpreter):
    def __init__(self, gm: fx.GraphModule, names: set[str], queries: set[str]) -> None:
        super().__init__(gm)
        self.names, self.queries = names, queries
        self.seen: dict[str, torch.Tensor] = {}

    def run_node(self, n: fx.Node) -> Any:
        out = super().run_node(n)
        if n.name in self.names:
            self.seen[n.name] = out
        if n.name in self.queries:
            self.seen[n.name] = out.abs().amax((2, 3), keepdim=True).float()
        return out


def _owned(
    run: Callable[..., Any], inputs: list[InputInfo], session: Session
) -> Callable[..., Any]:
    """A graph without caches of its own: caches that another graph keeps are put in order first."""

    mutated = [i.index for i in inputs if i.mutated]

    def call(args: list[Any]) -> Any:
        if OWNERS:
            for i in inputs:
                t = args[i.index]
                for st in owners(t):
                    session.undone |= not st.in_order
                    st.materialize()
                    st.dirty |= i.mutated and t.is_inference()  # it counts no version
        written = [args[i] for i in mutated]
        try:
            return run(args)
        finally:
            wrote(written)

    call._boxed_call = True  # type: ignore[attr-defined]
    return call


def rtc(gm: fx.GraphModule, example_inputs: Sequence[Any], **kwargs: Any) -> Callable[..., Any]:
    """``torch.compile(model, backend="rtc", options={...})``: options are those of rtc.Options.

    rtc does not see the cache tensors between calls on this road, so they are kept current after
    every call (``write_back``); :func:`rtc.compile` does without.
    """
    options = Options(**{**(kwargs.get("options") or {}), "write_back": True})
    compiler = Compiler(options, Session(write_back=True, watches=False))
    run = compiler(gm, example_inputs)

    def watched(*args: Any) -> Any:
        with compiler.ranks:
            return run(*args)

    return watched if compiler.ranks.dog is not None else run


# -- graph preparation -----------------------------------------------------------------------------


def _single(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and not x.is_floating_point() and x.numel() == 1


def _symbols(val: Any) -> set[Any]:
    node = getattr(val, "node", None)
    return set(node.expr.free_symbols) if node is not None else set()


def _grows(info: InputInfo) -> bool:
    """Whether rows are joined with it to something of symbolic size: a window that fills, or one
    whose new rows had another number before."""
    if info.is_int or info.parameter:
        return False
    queue = [info.node]
    while queue:
        for user in queue.pop().users:
            if user.target is aten.cat.default:
                if any(_symbols(n) for n in user.meta["val"].shape):
                    return True
            elif user.target in LAYOUT or user.target in COPIES:
                queue.append(user)
    return False


def _sizes_below(node: fx.Node) -> set[Any]:
    """Symbols in the sizes of all that is computed from ``node`` in one step."""
    out: set[Any] = set()
    for user in node.users:
        val = user.meta.get("val")
        if isinstance(val, torch.Tensor):
            out |= {s for n in val.shape for s in _symbols(n)}
    return out


__all__ = ["Compiler", "rtc"]
