"""``stepcast profile -o my-gpu.toml``: measure this machine's GPU and write a calibration."""

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import mean
from types import ModuleType

from stepcast.calibrate.classes import FittedClass, fit_classes, fit_energies, gpu_of
from stepcast.cli.output import print_json, print_warnings, terminal_width, write_file
from stepcast.cli.streams import show_status
from stepcast.cost.calibration import LOOKS, Calibration
from stepcast.cost.fits import default_fit
from stepcast.hardware import load_gpu
from stepcast.inputs.source import Source
from stepcast.ir.limits import DESCRIPTION
from stepcast.ir.types import FactDict, pick, require
from stepcast.pytorch import profile as measuring
from stepcast.pytorch.load import load_torch_with_gpu
from stepcast.pytorch.profile import Document, TorchBackend, gpu_cases, import_tables, sustained_cases
from stepcast.units import format_bytes, format_percent, format_rate, format_seconds
from stepcast.views.text import facts, table

LIMIT_S, QUICK_LIMIT_S = 150.0, 45.0  # of the operators; the rest is measured when the command runs again
KEEP_EVERY_S = 5.0
LOOK_EVERY = 5  # operators, between two measurements of the CPU


def run(args: argparse.Namespace) -> int:
    if vars(args)["import"]:
        return _import_tables(args)
    torch = load_torch_with_gpu()
    backend = TorchBackend(torch)
    gpu = gpu_of(args.gpu, [backend.device], "this machine")
    known = _known(Path(args.output), backend)
    cases = gpu_cases(gpu, default_fit(), backend.formats, args.quick)
    document = known or Document(gpu.name, backend.device, backend.software, measuring.MeasuredPoints())
    document = replace(document, gpu=gpu.name, launch=document.launch or backend.launch())
    paces = [document.launch]
    limit_s = QUICK_LIMIT_S if args.quick else LIMIT_S
    keep = _Keeper(args.output, document, lambda: paces.append(backend.launch()))
    points = measuring.measure(cases, backend, document.points, limit_s, time.monotonic, keep)
    sustained = sustained_cases(gpu, default_fit(), backend.formats)
    points = measuring.measure_sustained(sustained, backend, points)
    show_status("")
    power = fit_energies(sustained, points, gpu, default_fit())
    # Points of an earlier run with other options count too.
    every = {case.name: case for quick in (False, True)
             for case in gpu_cases(gpu, default_fit(), backend.formats, quick)}  # fmt: skip
    every |= {case.name: case for case in sustained}
    fit = Calibration(gpu.name, {}, power=power).adapt_fit(gpu, default_fit())
    fitted = fit_classes(tuple(every.values()), points.seconds, gpu, fit)
    before = int(paces[0].get(LOOKS, 1))
    names = [name for name in paces[0] if name != LOOKS]
    seen = {name: [paces[0][name]] * before + [pace[name] for pace in paces[1:]] for name in names}
    document = replace(
        document,
        points=points,
        power=power,
        corrections={entry.kind: entry.correction for entry in fitted},
        launch=({name: mean(values) for name, values in seen.items()} | {LOOKS: before + len(paces) - 1}),
    )
    document = _with_collectives(document, torch)
    _write(args.output, document)
    _show(args, document, fitted)
    return 0


def _import_tables(args: argparse.Namespace) -> int:
    """Write the calibration of a GPU that others measured."""
    require(not args.quick, "--quick has no effect with --import: nothing is measured; leave it out")
    rows = import_tables(vars(args)["import"], load_gpu(args.gpu) if args.gpu else None)
    fitted = fit_classes(rows.cases, rows.seconds, rows.gpu, default_fit())
    corrections = {entry.kind: entry.correction for entry in fitted}
    document = Document(rows.gpu.name, rows.device, rows.software, measuring.MeasuredPoints(rows.seconds), corrections)
    _write(args.output, document)
    _show(args, document, fitted)
    print_warnings(f"{count:,} rows were not taken: {why}" for why, count in rows.skipped.items())
    return 0


def _known(path: Path, backend: TorchBackend) -> Document | None:
    """Return what an earlier run measured on the same GPU with the same software."""
    if not path.exists():
        return None
    document = measuring.read_document(Source(path).text(DESCRIPTION), str(path))
    for what, old, new in (("GPU", document.device, backend.device), ("software", document.software, backend.software)):
        require(old == new, f"{path}: was measured with another {what} ({old}, not {new}); write to another file")
    return document


def _with_collectives(document: Document, torch: ModuleType) -> Document:
    """Measure all-reduce over the GPUs of this machine, unless an earlier run did."""
    ranks = int(torch.cuda.device_count())
    if ranks < 2 or document.collectives:
        return document
    try:
        return replace(document, collectives=tuple(measuring.all_reduce_points(torch, ranks)))
    except Exception as error:  # a broken fabric must not cost the points already measured
        failed = {**document.points.failed, f"all-reduce over {ranks} GPUs": str(error)[:200]}
        return replace(document, points=replace(document.points, failed=failed))


def _write(path: str, document: Document) -> None:
    write_file(path, measuring.to_toml(document).encode(), resumes=True)


class _Keeper:
    """Shows progress and saves what was measured, so that an interrupted run is not lost."""

    def __init__(self, path: str, document: Document, look: Callable[[], None]) -> None:
        self._path, self._document, self._written_s, self._look = path, document, 0.0, look

    def __call__(self, progress: measuring.MeasuringProgress) -> None:
        took = "failed" if progress.seconds is None else format_seconds(progress.seconds)
        line = f"{progress.done}/{progress.total}  {progress.elapsed_s:.0f} s  {progress.case.name}  {took}"
        if sys.stderr.isatty():
            show_status(line)
        elif progress.done % 25 == 0 or progress.done == progress.total:
            print(line, file=sys.stderr, flush=True)
        if progress.done % LOOK_EVERY == 0:
            self._look()  # at the CPU, whose speed varies from second to second
        if progress.elapsed_s - self._written_s >= KEEP_EVERY_S:
            self._written_s = progress.elapsed_s
            _write(self._path, replace(self._document, points=progress.points))


def _show(args: argparse.Namespace, document: Document, fitted: Sequence[FittedClass]) -> None:
    points = document.points
    about = pick(document, "gpu device software")
    about |= {"points": len(points.seconds), "failed": len(points.failed), "left": len(points.left)}
    about["output"] = args.output
    if args.json:
        classes = map(asdict, fitted)
        details: FactDict = {"failed": dict(points.failed), "classes": {own.pop("kind"): own for own in classes}}
        details |= {"launch": dict(document.launch), "collectives": list(document.collectives)}
        print_json({**about, **details})
        return
    launch_s = {name: format_seconds(value) for name, value in document.launch.items() if name != "looks"}
    print(facts({**about, **launch_s}.items()), end="\n\n")
    heads = ("class", "points", "error before", "after", "on points left out", "factor")
    rows: list[Sequence[object]] = []
    for entry in fitted:
        errors = map(format_percent, (entry.before, entry.after, entry.left_out or 0.0))
        rows.append((entry.kind, entry.points, *errors, f"{entry.correction.factor:.3f}"))
    print(table(heads, rows, terminal_width()))
    if document.collectives:
        rows = []
        for row in document.collectives:
            size, seconds = format_bytes(float(row["size_bytes"])), format_seconds(float(row["seconds"]))
            rows.append((size, seconds, format_rate(measuring.bus_bytes_per_s(row))))
        print()
        print(table(("all-reduce", "time", "bus bandwidth"), rows, terminal_width()))
    print_warnings(f"{name} failed: {why}" for name, why in list(points.failed.items())[:5])
    if points.left:
        print_warnings([f"{len(points.left)} cases were not reached in time; run the same command again"])
