"""Random models against eager: ``python bench/fuzz_forms.py --seeds 0:200 --steps 40``.

Each seed makes one small float64 model with caches, and a user who meddles with them between calls.
A seed is wrong where outputs or caches differ from eager, and a crash is a bug too; an error that
rtc raises on purpose is not. ``--show 17`` prints the model of a seed, ``--shrink 17`` the simplest
spec that fails like it. Exit status 1 where any seed is wrong or crashes.
"""

import argparse
import collections
import importlib.machinery
import importlib.util
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


def load(name: str) -> Any:
    """``tests/fuzz/<name>.py``, from wherever this is started."""
    package = "rtc_fuzz"
    if package not in sys.modules:
        spec = importlib.machinery.ModuleSpec(package, None, is_package=True)
        spec.submodule_search_locations = [str(ROOT / "tests" / "fuzz")]
        sys.modules[package] = importlib.util.module_from_spec(spec)
    return importlib.import_module(f"{package}.{name}")


def shrink(failing: Any, options: Any, steps: int) -> Any:
    """The simplest spec found that fails in the same way, by greedy descent."""
    specs, drive = load("spec"), load("drive")
    kind = drive.run(failing, options, steps).kind
    progress = True
    while progress:
        progress = False
        for what, simpler in specs.simpler(failing):
            found = drive.run(simpler, options, steps)
            if found.kind == kind:
                print(f"  {what}: still {' '.join(kind)}", file=sys.stderr)
                failing, progress = simpler, True
                break
    return failing


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--seeds", default="0:100", help="first:last, or a comma-separated list")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--lowering", default="eager", choices=("eager", "inductor"))
    parser.add_argument("--step-graph", default="off", choices=("off", "simulate"))
    parser.add_argument("--quiet", action="store_true", help="print only what is not fine")
    parser.add_argument("--show", type=int, metavar="SEED", help="print a seed's spec and source")
    parser.add_argument("--shrink", type=int, metavar="SEED", help="simplify a failing seed")
    args = parser.parse_args()

    import rtc

    specs, drive, source = load("spec"), load("drive"), load("source")
    options = rtc.Options(lowering=args.lowering, step_graph=args.step_graph, warn=False)
    if args.show is not None:
        spec = specs.draw(args.show, args.steps)
        print(specs.shown(spec), source.source(spec), sep="\n\n")
        return 0
    if args.shrink is not None:
        spec = shrink(specs.draw(args.shrink, args.steps), options, args.steps)
        found = drive.run(spec, options, args.steps)
        print(specs.shown(spec), source.source(spec), found.status, found.message, sep="\n\n")
        return 1

    if ":" in args.seeds:
        first, last = (int(n) for n in args.seeds.split(":"))
        seeds = list(range(first, last))
    else:
        seeds = [int(n) for n in args.seeds.split(",")]
    total: collections.Counter[str] = collections.Counter()
    started = time.perf_counter()
    for seed in seeds:
        spec = specs.draw(seed, args.steps)
        found = drive.run(spec, options, args.steps)
        total[found.status] += 1
        for name, n in found.applied.items():
            total[name] += n > 0
        total["took the plain path"] += found.runtime.get("plain_calls", 0) > 0
        if found.status != "ok" or not args.quiet:
            line = f"{seed} {found.status} {found.applied} {found.runtime.get('plain_calls')} plain"
            print(
                f"{line} {found.place} {found.message.splitlines()[0] if found.message else ''}",
                flush=True,
            )
    seconds = time.perf_counter() - started
    print(f"{len(seeds)} seeds, {args.steps} steps each, {seconds:.0f} s: {dict(total)}")
    return int(total["wrong"] + total["crash"] > 0)


if __name__ == "__main__":
    sys.exit(main())
