"""One compiled model among the ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import fx

from rtc.options import Options
from rtc.passes.analysis.host import InputInfo
from rtc.ranks import facts
from rtc.ranks.agree import agree
from rtc.ranks.store import Party, party
from rtc.ranks.watchdog import Watchdog, watch


class Ranks:
    """A context around every call; ``join`` and ``agree`` around the compile of a graph.

    Without collectives in the model's graphs, all of it does nothing.
    """

    def __init__(self) -> None:
        self.dog: Watchdog | None = None
        self._depth = 0

    def __enter__(self) -> Ranks:
        if self.dog is not None:
            self.dog.enter()
        self._depth += 1
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._depth -= 1
        if self.dog is not None:
            self.dog.leave(error)

    def join(self, gm: fx.GraphModule, options: Options) -> list[Party]:
        """The groups that a traced graph talks to; from the first one on, they are watched."""
        parties = [p for g in facts.groups(gm) if (p := party(g)) is not None]
        others = {r for p in parties for r in p.ranks}
        if parties and (self.dog is None or self.dog.stopped.is_set()):
            self.dog = watch(others, options.rank_timeout_s)
            for _ in range(self._depth):  # the call that compiles
                self.dog.begin()
        for r in others:
            assert self.dog is not None
            self.dog.more(r)
        return parties

    def agree(
        self, parties: Sequence[Party], options: Options, inputs: Sequence[InputInfo],
        sample: Mapping[fx.Node, int], traced: fx.GraphModule, rewritten: fx.GraphModule,
    ) -> None:  # fmt: skip
        """RanksDisagreeError or RankLostError unless all ranks of the graph's groups are about to
        run the same program."""
        if not parties:
            return
        assert self.dog is not None
        dog, mine = self.dog, facts.of_compile(options, inputs, sample, traced, rewritten)
        for p in parties:
            agree(p, mine, options.rank_timeout_s, lambda: dog.failure)

    def close(self) -> None:
        """The model is not called any more. Idempotent."""
        if self.dog is not None:
            self.dog.release()
            self.dog = None
