"""Traces of ByteDance-Seed/StragglerAnalysis as text: one row for an operation of one worker in one step."""

from collections import defaultdict

import numpy as np

from stepcast.inputs.errors import FormatError
from stepcast.inputs.rows import csv_rows
from stepcast.inputs.source import Source
from stepcast.ir.stragglers import Operation, WorkerSteps

COLUMNS = ("dp_rank", "stage", "rank", "step", "optype", "start_ts", "duration", "seq_id", "mc", "gmc")
WHOLE = ("dp_rank", "stage", "rank", "step", "seq_id", "mc", "gmc")


def looks_like(head: str) -> bool:
    first = head.lstrip().partition("\n")[0].strip().split(",")
    return {"dp_rank", "stage", "optype", "start_ts", "duration", "seq_id"} <= set(first)


def read(source: Source) -> WorkerSteps:
    rows = csv_rows(source)
    heads = [name.strip() for name in next(rows, [])]
    if missing := [name for name in COLUMNS if name not in heads]:
        raise FormatError(f"column {missing[0]} is missing", source.path, 1)
    at = [heads.index(name) for name in COLUMNS]
    found: dict[int, dict[int, dict[tuple[int, str, int], tuple[float, float, int, int]]]] = defaultdict(
        lambda: defaultdict(dict)
    )
    ranks: dict[tuple[int, int], int] = {}
    for line, row in enumerate(rows, 2):
        if not row:
            continue
        try:
            dp, stage, rank, step, kind, start, took, turn, chunk, place = (row[index] for index in at)
            key = (int(stage), kind, int(turn))
            begin_s, took_s = float(start), float(took)
            found[int(step)][int(dp)][key] = (begin_s, took_s, int(chunk), int(place))
            ranks[int(dp), int(stage)] = int(rank)
        except (ValueError, IndexError):
            raise FormatError("expected numbers in the columns of an operation", source.path, line) from None
        if not (np.isfinite(begin_s) and np.isfinite(took_s) and took_s >= 0):
            raise FormatError("times must be finite, durations zero or more", source.path, line)
    if not found:
        raise FormatError("holds no operation", source.path)
    return _arranged(found, ranks, source.path)


def _arranged(
    found: dict[int, dict[int, dict[tuple[int, str, int], tuple[float, float, int, int]]]],
    ranks: dict[tuple[int, int], int],
    path: str,
) -> WorkerSteps:
    replicas, stages = (1 + max(key[axis] for key in ranks) for axis in (0, 1))
    if len(ranks) != replicas * stages or min(min(key) for key in ranks) < 0:
        raise FormatError(f"expected every stage of {replicas} replicas of {stages} stages", path)
    first = found[min(found)].get(0, {})
    order = sorted(first, key=lambda key: (first[key][0], key))
    whole = [
        step
        for step in sorted(found)
        if len(found[step]) == replicas and all(own.keys() == first.keys() for own in found[step].values())
    ]
    if not whole:
        raise FormatError("no step has the same operations in every replica", path)
    values = np.array(
        [[[found[step][dp][key][:2] for key in order] for dp in range(replicas)] for step in whole]
    )
    left = len(found) - len(whole)
    warnings = (f"{left} of {len(found)} steps lack operations and are left out",) if left else ()
    return WorkerSteps(
        operations=tuple(Operation(*key, *first[key][2:]) for key in order),
        steps=tuple(whole),
        ranks=np.array([[ranks[dp, stage] for stage in range(stages)] for dp in range(replicas)]),
        start_s=values[..., 0],
        duration_s=values[..., 1],
        source=path,
        warnings=warnings,
    )
