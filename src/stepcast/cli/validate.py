"""``stepcast validate``: the accuracy scoreboard, our predictions against measurements."""

import argparse
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path

import numpy as np

from stepcast.cli.options import check_applicable
from stepcast.cli.output import ProgressBar, show_view, write_file
from stepcast.cli.streams import show_status
from stepcast.ir.progress import watch_progress
from stepcast.ir.types import FactDict, PointFacts, pick, require
from stepcast.outputs.plain import csv_bytes
from stepcast.validate.scoreboard import MEASUREMENT_SETS, MeasuredColumns, MeasurementSet, Scoreboard, build_scoreboard
from stepcast.views.compare import MOST_DOTS, validate_view

ENDS = ("low_s", "high_s")


def run(args: argparse.Namespace) -> int:
    boards: dict[str, Scoreboard] = {}
    measured: dict[str, MeasuredColumns] = {}
    places, absent = _places(args)
    check_applicable(args, sets=[entry.name for entry, _ in places])
    for entry, paths in places:
        show_status(entry.name)
        with watch_progress(ProgressBar(entry.name, " rows")):
            named = {"nccl-tests": {"cluster": args.cluster}, "transformers": {"calibration": args.calibration}}
            options = {option: value for option, value in named.get(entry.name, {}).items() if value}
            measurements = entry.measure(*map(str, paths), **options)
        board = build_scoreboard(measurements)
        if args.data and board.summary is None:
            counted = "; ".join(f"{reason} ({count} rows)" for reason, count in board.skipped.items())
            why = counted.replace("(1 rows)", "(1 row)") or "give a folder laid out like the set"
            raise ValueError(f"{paths[0]}: no row of the set {entry.name} could be compared: {why}")
        boards[entry.name], measured[entry.name] = board, measurements.columns
    show_status("")
    sets = {name: _board_facts(board) for name, board in boards.items()}
    units = {name: board.unit for name, board in boards.items()}
    if args.output:
        _write_csv(args.output, measured, units)
    facts = {"sets": sets, "absent": [entry.name for entry in absent]}
    points = {name: list(_points(columns, MOST_DOTS)) for name, columns in measured.items()} if args.html else {}
    lines = [f"{entry.name}: not at hand ({entry.about}); give its folder with --data DIR" for entry in absent]
    show_view(args, validate_view(facts, points, units, lines))
    return 0


def _points(columns: MeasuredColumns, most: int) -> Iterable[PointFacts]:
    """Rows to draw: all, or evenly picked ones and the worst."""
    picked = np.arange(len(columns))
    if len(picked) > most:
        worst = np.argsort(-abs(columns.error))[: most // 4]
        picked = np.union1d(worst, np.linspace(0, len(columns) - 1, most - len(worst)).astype(int))
    for row in map(columns.row, picked.tolist()):
        yield PointFacts(name=row.name, measured=row.measured_s, predicted=row.predicted_s)


Places = list[tuple[MeasurementSet, tuple[Path, ...]]]


def _places(args: argparse.Namespace) -> tuple[Places, list[MeasurementSet]]:
    """Return the sets to measure with their folders, and the missing ones."""
    for name in args.set or ():
        require(name in MEASUREMENT_SETS, f"unknown measurement set {name!r}; known are {', '.join(MEASUREMENT_SETS)}")
    usual = [name for name, entry in MEASUREMENT_SETS.items() if not entry.when_named]
    chosen = [MEASUREMENT_SETS[name] for name in dict.fromkeys(args.set or usual)]
    require(args.data != "", "--data names nothing; is a variable of your shell not set?")
    if args.data:
        data = Path(args.data)
        require(data.exists(), f"{data}: no such file or folder")
        given = [(entry, inside) for entry in chosen if (inside := _folders_in(data, entry))]
        if args.set and len(chosen) == 1:
            given = given or [(chosen[0], (data,))]
        if not given:
            folders = ", ".join(entry.folders[0] for entry in chosen)
            raise ValueError(f"{data}: holds none of the folders {folders}; say which set it is with --set")
        return given, []
    places = [(entry, paths) for entry in chosen if (paths := _default_places(entry))]
    absent = [entry for entry in chosen if entry not in [there for there, _ in places]]
    if args.set and absent:
        raise ValueError(f"the rows of {absent[0].name} are not at hand; give their folder with --data DIR")
    return places, absent


def _folders_in(data: Path, entry: MeasurementSet) -> tuple[Path, ...]:
    """Return the folders of *entry* in *data*; none if its first is missing."""
    if not (data / entry.folders[0]).is_dir():
        return ()
    return tuple(data / folder for folder in entry.folders if (data / folder).is_dir())


def _default_places(entry: MeasurementSet) -> tuple[Path, ...]:
    """Rows inside the package, or in ``shared/data`` outside the checkout."""
    package = Path(__file__).resolve().parents[1]
    outside = [root / "shared" / "data" for root in (Path.cwd().parent, package.parents[2])]
    return next(filter(None, (_folders_in(data, entry) for data in (package / "data", *outside))), ())


def _board_facts(board: Scoreboard) -> FactDict:
    """Return the facts of one set."""
    of_row = f"name measured_{board.unit}=measured_s predicted_{board.unit}=predicted_s error"
    return {
        **({"rows": 0} if board.summary is None else asdict(board.summary)),
        "skipped": sum(board.skipped.values()),
        "skip_reasons": dict(board.skipped),
        "figures": dict(board.figures),
        "selections": {name: asdict(row) for name, row in board.selections.items()},
        "groups": {tag: {name: asdict(row) for name, row in group.items()} for tag, group in board.groups.items()},
        "worst": [{**pick(row, of_row), **row.tags} for row in board.worst],
        "notes": list(board.notes),
    }


def _write_csv(path: str, measured: Mapping[str, MeasuredColumns], units: Mapping[str, str]) -> None:
    """Write all rows; sets of one unit share its two columns, and what a row does not have is blank."""
    rows: list[dict[str, str]] = []
    for name, columns in measured.items():
        tags = {tag: values.tolist() for tag, values in columns.tags.items()}
        ends = {} if columns.ends is None else dict(zip(ENDS, columns.ends, strict=True))
        times = zip(columns.measured_s.tolist(), columns.predicted_s.tolist(), strict=True)
        for index, (measured_s, predicted_s) in enumerate(times):
            pair = {f"measured_{units[name]}": f"{measured_s:.9g}", f"predicted_{units[name]}": f"{predicted_s:.9g}"}
            interval = {end: f"{float(side[index]):.9g}" for end, side in ends.items() if side[index] == side[index]}
            about = {"set": name, "name": columns.name(index), **{tag: values[index] for tag, values in tags.items()}}
            rows.append({**about, **pair, "error": f"{predicted_s / measured_s - 1:.6g}", **interval})
    known = [unit for unit in ("s", "bytes") if unit in units.values()]
    heads = [f"{side}_{unit}" for unit in known for side in ("measured", "predicted")]
    banded = ENDS if any(columns.ends is not None for columns in measured.values()) else ()
    tagged = dict.fromkeys(tag for columns in measured.values() for tag in columns.tags)
    names = ("set", "name", *tagged, *heads, "error", *banded)
    write_file(path, csv_bytes(names, [[row.get(name, "") for name in names] for row in rows]))
