"""``stepcast sweep SPEC.toml -o DIR``, and the views of its answers: status, show, export."""

import argparse
import os
import time
from collections.abc import Callable
from dataclasses import asdict

import msgspec

from stepcast.cli.interrupts import Interruptible
from stepcast.cli.output import print_notes, print_view, write_file, write_view
from stepcast.cli.streams import show_status
from stepcast.inputs.source import Source, prefix_errors
from stepcast.ir.limits import DESCRIPTION
from stepcast.ir.types import require
from stepcast.outputs.plain import table_bytes
from stepcast.questions.choices import option_of, refuse_options
from stepcast.sweep.spec import read_spec
from stepcast.sweep.store import Progress, Store, page_facts, rows_of, status_facts, sweep
from stepcast.views.declared import phrase
from stepcast.views.search import counts_view, rows_view, sweep_view
from stepcast.views.view import View

RUNNING = ("html", "output", "engine", "workers", "address", "limit")
FORMATS = ("csv", "parquet", "json")
EVERY_S = 0.2


def run(args: argparse.Namespace) -> int:
    asks = args.what not in VIEWS or os.path.isfile(args.what)
    require(asks or args.folder is not None, f"'stepcast sweep {args.what}' needs the folder of a sweep")
    if asks and args.folder is not None:
        raise ValueError(f"unexpected argument {args.folder!r}; give the folder of the answers as -o {args.folder}")
    used = ASKING if asks else VIEWS[args.what][1]
    every = {*ASKING, *(name for _, names in VIEWS.values() for name in names)}
    takes = ", ".join(map(option_of, used)) or "--json alone"
    why = f"has no effect with 'stepcast sweep {args.what}', which takes {takes}"
    refuse_options(sorted(args.given & every - set(used)), why)
    if asks:
        return _ask(args)
    print_view(args, VIEWS[args.what][0](args))
    return 0


def _ask(args: argparse.Namespace) -> int:
    from stepcast.cli.sweep_points import answers, check_many, check_words, digest, program

    if os.path.isdir(args.what):
        raise ValueError(f"{args.what}: is a folder; 'stepcast sweep show {args.what}' shows the answers in it")
    spec = read_spec(Source(args.what).text(DESCRIPTION), args.what)
    with prefix_errors(args.what):
        check_words(spec)
        require(next(spec.points(), None) is not None, f"where = {spec.filter and spec.filter.text!r} leaves no point")
    if args.dry_run:
        refuse_options(sorted(args.given.intersection(RUNNING)), "has no effect with --dry-run")
        points, exact = spec.count_points()
        if not exact:
            print_notes([f"the count is estimated from a random sample of the {spec.size:,} points"])
        print_view(args, counts_view({"points": points, "of": spec.size}))
        return 0
    require(args.output is not None, "no folder for the answers: use -o DIR")
    require(not args.address or args.engine != "local", "--address has no effect with --engine local")
    if args.workers and args.address and args.engine in ("ray", "dask"):
        raise ValueError("--workers has no effect with --address: the cluster has its own workers")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    workers = args.workers or cores
    if args.limit is None:
        check_many(spec, workers)
    watching = _SweepWatch()
    try:
        with Interruptible():
            where = (args.engine, workers, args.address)
            summary = sweep(spec, args.output, answers, digest, program(), *where, watching, args.limit, program)
    except KeyboardInterrupt:
        show_status("")
        print_notes([f"{watching.answered:,} answers are saved; the same command resumes the sweep"])
        raise
    finally:
        show_status("")
    _write_page(args, args.output)
    counted = {name: value for name, value in asdict(summary).items() if name != "best"}
    if summary.errors:
        with Store(args.output) as store:
            counted["common_errors"] = status_facts(store)["common_errors"]
    print_view(args, counts_view({"folder": args.output, **counted, "points_per_s": summary.rate}))
    return 1 if summary.errors else 0


def _write_page(args: argparse.Namespace, folder: str) -> None:
    """Write the page of all answers in *folder* where one was asked for."""
    if args.html:
        with Store(folder) as store:
            facts = {"folder": folder, **page_facts(store)}
        write_view(args, sweep_view(facts))


class _SweepWatch:
    def __init__(self) -> None:
        self.last, self.answered = 0.0, 0

    def __call__(self, progress: Progress) -> None:
        self.answered = progress.answered
        now = time.monotonic()
        if now - self.last < EVERY_S:
            return
        self.last = now
        left_s = (progress.points - progress.answered) / progress.rate if progress.rate else None
        errors = progress.errors or None
        words = phrase("sweep-progress", asdict(progress), errors=errors, rate=progress.rate or None, left_s=left_s)
        show_status(words)


def _status(args: argparse.Namespace) -> View:
    with Store(args.folder) as store:
        return counts_view({"folder": args.folder, **status_facts(store)})


def _show(args: argparse.Namespace) -> View:
    _write_page(args, args.folder)
    with Store(args.folder) as store:
        rows = rows_of(store, args.where, args.sort, args.top or 20, args.reverse)
        return rows_view({"folder": args.folder, **store.counts(), "rows": rows})


def _export(args: argparse.Namespace) -> View:
    if args.to is None and args.to_file is None:
        raise ValueError("export needs --to csv, parquet or json, or --to-file with such an ending")
    kind = args.to or os.path.splitext(args.to_file)[1].lstrip(".")
    require(kind in FORMATS, f"{args.to_file}: expected a name that ends in .csv, .parquet or .json, or --to")
    name = args.to_file or os.path.join(args.folder, f"results.{kind}")
    with Store(args.folder) as store:
        rows = rows_of(store, args.where, args.sort or "position", args.top, args.reverse)
    write_file(name, msgspec.json.encode(rows) + b"\n" if kind == "json" else table_bytes(f"{name}.{kind}", rows))
    return counts_view({"written": name, "rows": len(rows)})


# The verbs that see answers, and the options that matter to each; and those that matter to a new sweep.
VIEWS: dict[str, tuple[Callable[[argparse.Namespace], View], tuple[str, ...]]] = {
    "status": (_status, ()),
    "show": (_show, ("html", "where", "sort", "reverse", "top")),
    "export": (_export, ("where", "sort", "reverse", "top", "to", "to_file")),
}
ASKING = (*RUNNING, "dry_run")
