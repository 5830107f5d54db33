"""``rtc demo``, ``rtc explain TARGET``, ``rtc run TARGET``, ``rtc passes``, ``rtc --version``.

Results go to stdout, as text or with --json as one JSON document; progress and errors to stderr.
Exit codes: 0 ok, 1 a check failed, 2 usage or bad input, 130 interrupted.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import math
import os
import platform
import signal
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch

import rtc
from rtc import cli_run
from rtc.cli_run import UsageError
from rtc.demo.settings import without
from rtc.options import Options
from rtc.passes.pipeline import PIPELINE, names

OK, FAILED, USAGE, INTERRUPTED = 0, 1, 2, 130


_TARGET_HELP = """\
factory() returns (model, args) or (model, args, kwargs): a module or a function, and the arguments
of one steady call, with args a tuple. It may return the model alone if the same file also has
example_inputs(), which then returns args or (args, kwargs).

Try it: rtc explain rtc.demo:tiny
"""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(USAGE, f"rtc: error: {message} (see {self.prog} --help)\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line; returns the exit code, and leaves only for --help and bad usage."""
    args = parser().parse_args(argv)
    try:
        if args.version:
            return _version(args)
        if args.command is None:
            parser().error("no command: demo, explain, run or passes")
        code: int = args.run(args)
        sys.stdout.flush()
        return code
    except (UsageError, rtc.RtcError) as e:
        print(f"rtc: error: {e}", file=sys.stderr)
        return USAGE
    except KeyboardInterrupt:
        print("rtc: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # `rtc passes | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return OK


def parser() -> argparse.ArgumentParser:
    top = _Parser(prog="rtc", description=rtc.__doc__)
    top.add_argument("--version", action="store_true", help="print the versions and stop")
    top.add_argument("--json", action="store_true", help="print JSON on stdout")
    top.set_defaults(command=None)
    commands = top.add_subparsers(metavar="COMMAND", parser_class=_Parser)

    p = commands.add_parser("passes", help="list the passes in the order in which they run")
    p.set_defaults(command="passes", run=_passes)
    _json(p)

    p = commands.add_parser(
        "explain",
        help="show what would be rewritten in your model, and why not more",
        description="Trace a model and show every pass's decision. Nothing is run.",
        epilog=_TARGET_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    p.add_argument(
        "target", metavar="TARGET", help="path/to/file.py:factory or package.module:factory"
    )
    p.add_argument(
        "--html", metavar="FILE", type=Path, help="write the report as one HTML file too"
    )
    p.set_defaults(command="explain", run=_explain)
    _json(p)
    _options(p)

    p = commands.add_parser(
        "run",
        help="compile your model and time its steps, alone or on several ranks (torchrun)",
        description="Compile a model, run it, and print what a step takes on each rank.",
        epilog=_TARGET_HELP.replace("rtc explain", "rtc run") + cli_run.HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    p.add_argument(
        "target", metavar="TARGET", help="path/to/file.py:factory or package.module:factory"
    )
    cli_run.arguments(p)
    p.set_defaults(command="run", run=_run)
    _json(p)
    _options(p)

    p = commands.add_parser(
        "demo",
        help="stream a small video model on this machine: checked against eager, and timed",
        description="Stream chunks through eager, torch.compile and rtc side by side; compare "
        "every chunk and, at the end, all caches; write a report.",
    )
    _demo_arguments(p)
    p.set_defaults(command="demo", run=_demo)
    _json(p)
    _options(p)
    return top


def _json(p: argparse.ArgumentParser) -> None:
    # SUPPRESS: `rtc --json passes` must not be undone by the subparser's default
    p.add_argument(
        "--json", action="store_true", default=argparse.SUPPRESS, help="print JSON on stdout"
    )


# Passes that need consent: their flags switch them on.
_CONSENT = {
    "quantize_kv": "an FP8 cache for a model that has none (changes numerics)",
    "fp8_attention": "attention over FP8 keys and values (changes numerics)",
    "fuse_all_reduce_norm": "rows normed by one rank for all: all but the linears is replicated",
}


def _switch(name: str) -> str:
    return ("--" if name in _CONSENT else "--no-") + name.replace("_", "-")


def _options(p: argparse.ArgumentParser) -> None:
    group = p.add_argument_group("passes")
    for name in names():
        what = "consent to " + _CONSENT[name] if name in _CONSENT else f"switch {name} off"
        group.add_argument(_switch(name), action="store_true", help=what)
    group.add_argument(
        "--quantize", choices=("exact", "calibrated"), default="exact",
        help="calibrated: consent to FP8 scales measured once a session (changes numerics)",
    )  # fmt: skip


def options_of(args: argparse.Namespace) -> Options:
    said = [n for n in names() if getattr(args, _switch(n)[2:].replace("-", "_"))]
    off = [n for n in said if n not in _CONSENT]
    lowering = getattr(args, "lowering", "inductor")  # explain generates no code
    options = Options(
        quantize=args.quantize, lowering=lowering,
        rank_timeout_s=getattr(args, "rank_timeout", Options.rank_timeout_s),
        quantize_kv="quantize_kv" in said, fp8_attention="fp8_attention" in said,
        fuse_all_reduce_norm="fuse_all_reduce_norm" in said,
    )  # fmt: skip
    return without(options, off)


def _demo_arguments(p: argparse.ArgumentParser) -> None:
    from rtc.model import PRESETS

    p.add_argument("--preset", default="cpu", choices=sorted(PRESETS), help="default: cpu")
    p.add_argument(
        "--chunks", type=int, default=100, help="chunks to stream (default: 100, two resets)"
    )
    p.add_argument(
        "--dtype", default="float32", choices=("float32", "float64", "bfloat16", "float16")
    )
    p.add_argument("--device", default="cpu", help="cpu (default) or cuda")
    p.add_argument(
        "--lowering", choices=("inductor", "eager"), default="inductor",
        help="eager: run the rewritten graph op by op; needs no compiler, and is slow",
    )  # fmt: skip
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--threads", type=int, help="default: as many as there are free cores")
    p.add_argument(
        "--out", metavar="FILE", type=Path, default=Path("rtc-report.html"),
        help="the HTML report (default: rtc-report.html)",
    )  # fmt: skip
    p.add_argument(
        "--quick", action="store_true",
        help="only eager, torch.compile and rtc: no runs with passes off, no warm compiles",
    )  # fmt: skip


# -- commands --------------------------------------------------------------------------------------


def _version(args: argparse.Namespace) -> int:
    have = {"rtc": rtc.__version__, "torch": torch.__version__, "python": platform.python_version()}
    if args.json:
        _dump(have)
    else:
        print(f"rtc {have['rtc']} (torch {have['torch']}, Python {have['python']})")
    return OK


def _passes(args: argparse.Namespace) -> int:
    switches = Options().switches()  # of passes that have a field; others are on
    rows = [
        {
            "name": p.name,
            "tier": p.tier,
            "summary": p.summary,
            "default": switches.get(p.name, True),
            "switch": _switch(p.name),
        }
        for p in PIPELINE
    ]
    if args.json:
        _dump({"passes": rows})
    else:
        from rtc.show import text

        text.print_passes(text.console(), rows)
    return OK


def _explain(args: argparse.Namespace) -> int:
    from rtc import target

    options = options_of(args)
    if args.html is not None:
        _writable(args.html)
    with _quiet_stdout():
        t = target.load(args.target)
        logging.disable(logging.ERROR)  # what fails is said in one line, below
        try:
            report = rtc.explain(t.model, *t.args, options=options, **t.kwargs).to_dict()
        except rtc.RtcError:
            raise
        except Exception as e:
            problem = target.capture_problem(e)
            raise UsageError(f"{args.target} cannot be captured as one graph: {problem}") from e
        finally:
            logging.disable(logging.NOTSET)
    if args.html is not None:
        from rtc.show import html

        args.html.write_text(html.explain_page(args.target, report), encoding="utf-8")
    if args.json:
        _dump({"target": args.target, **report})
        return OK
    from rtc.show import text

    text.print_report(text.console(), report)
    if args.html is not None:
        print(f"report: {args.html}", file=sys.stderr)
    return OK


def _run(args: argparse.Namespace) -> int:
    from rtc.show import run as show
    from rtc.show import text

    options = options_of(args)
    with _quiet_stdout():
        code, result = cli_run.command(args, options)
    if result is None:
        return code
    if args.json:
        _dump(result)
    else:
        show.print_run(text.console(), result)
    return code


def _demo(args: argparse.Namespace) -> int:
    from rtc import demo
    from rtc.show import demo_html

    settings = demo.Settings(
        preset=args.preset, chunks=args.chunks, dtype=args.dtype, device=args.device,
        seed=args.seed, threads=args.threads, quick=args.quick, options=options_of(args),
    )  # fmt: skip
    _writable(args.out)
    with _quiet_stdout(), _terminate_as_interrupt():
        result = demo.run(settings)
    args.out.write_text(demo_html.demo_page(result), encoding="utf-8")
    if args.json:
        _dump({**result, "html": str(args.out)})
    else:
        from rtc.show import summary, text

        summary.print_demo(text.console(), result)
        print(f"\nreport: {args.out}")
    if result["interrupted"]:
        print(
            f"rtc: interrupted while {result['interrupted']}; kept what was measured",
            file=sys.stderr,
        )
        return INTERRUPTED
    for failure in result["failures"]:
        print(f"rtc: check failed: {failure}", file=sys.stderr)
    return OK if result["ok"] else FAILED


# -- helpers ---------------------------------------------------------------------------------------


@contextlib.contextmanager
def _quiet_stdout() -> Iterator[None]:
    """The model's own prints go to stderr: stdout holds the result alone."""
    with contextlib.redirect_stdout(sys.stderr):
        yield


@contextlib.contextmanager
def _terminate_as_interrupt() -> Iterator[None]:
    """`kill` and `timeout` end a run as Ctrl-C does: what was measured is kept."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _writable(path: Path) -> None:
    """Found out before minutes are spent. UsageError."""
    if path.is_dir():
        raise UsageError(f"{path} is a folder: name a file")
    if not path.absolute().parent.is_dir():
        raise UsageError(f"no folder {path.absolute().parent} to write {path.name} in")
    if not os.access(path if path.exists() else path.absolute().parent, os.W_OK):
        raise UsageError(f"no permission to write {path}")


def _dump(value: Any) -> None:
    """One JSON document. JSON knows neither infinity nor NaN: they become null."""

    def plain(x: Any) -> Any:
        if isinstance(x, float):
            return x if math.isfinite(x) else None
        if isinstance(x, Mapping):
            return {str(k): plain(v) for k, v in x.items()}
        if isinstance(x, (list, tuple)):
            return [plain(v) for v in x]
        return x if x is None or isinstance(x, (str, int)) else str(x)

    json.dump(plain(value), sys.stdout, indent=1, allow_nan=False)
    sys.stdout.write("\n")


if __name__ == "__main__":
    sys.exit(main())
