"""Traces of ByteDance-Seed/StragglerAnalysis as text: one row for an operation of one worker in one step."""

from collections import Counter, defaultdict

import numpy as np

from stepcast.inputs.source import FormatError, Source, expect, open_columns
from stepcast.ir.measured import ReplicaOperation, WorkerSteps

COLUMNS = ("dp_rank", "stage", "rank", "step", "optype", "start_ts", "duration", "seq_id", "mc", "gmc")
Key = tuple[int, str, int]  # stage, kind and turn of an operation
Value = tuple[float, float, int, int]  # start, duration, chunk, position in the model
Steps = dict[int, dict[int, dict[Key, Value]]]  # of each step, of each replica


def read(source: Source) -> WorkerSteps:
    steps: Steps = defaultdict(lambda: defaultdict(dict))
    ranks: dict[tuple[int, int], int] = {}
    for line, row in open_columns(source, COLUMNS, "an operation"):
        dp, stage, rank, step, kind, start, duration, turn, chunk, position = row
        try:
            key = (int(stage), kind, int(turn))
            start_s, duration_s = float(start), float(duration)
            steps[int(step)][int(dp)][key] = (start_s, duration_s, int(chunk), int(position))
            ranks[int(dp), int(stage)] = int(rank)
        except ValueError:
            raise FormatError("expected numbers in the columns of an operation", source.path, line) from None
        if not (np.isfinite(start_s) and np.isfinite(duration_s) and duration_s >= 0):
            raise FormatError("times must be finite, durations zero or more", source.path, line)
    expect(steps, "holds no operation", source.path)
    return _arrange(steps, ranks, source.path)


def _arrange(steps: Steps, ranks: dict[tuple[int, int], int], path: str) -> WorkerSteps:
    """Return replicas that have every stage, in the steps in which they all do the same."""
    stages = 1 + max(stage for _, stage in ranks)
    named = sorted({replica for replica, _ in ranks})
    replicas = [replica for replica in named if all((replica, stage) in ranks for stage in range(stages))]
    if not replicas or min(min(key) for key in ranks) < 0:
        raise FormatError(f"expected every stage of {len(named)} replicas of {stages} stages", path)
    # The operations that the most steps of the most replicas have; of equals the first.
    counts = Counter(
        frozenset(steps[step][replica]) for step in sorted(steps) for replica in replicas if replica in steps[step]
    )
    usual = max(counts, key=lambda keys: counts[keys])
    complete = [
        step for step in sorted(steps) if all(steps[step].get(replica, {}).keys() == usual for replica in replicas)
    ]
    expect(complete, "no step has the same operations in every replica", path)
    first = steps[complete[0]][replicas[0]]
    order = sorted(first, key=lambda key: (first[key][0], key))
    values = np.array([[[steps[step][replica][key][:2] for key in order] for replica in replicas] for step in complete])
    warnings = []
    if left_out := len(steps) - len(complete):
        warnings.append(f"{left_out} of {len(steps)} steps lack operations and are left out")
    if missing := len(named) - len(replicas):
        warnings.append(f"{missing} of {len(named)} replicas lack stages and are left out")
    return WorkerSteps(
        operations=tuple(ReplicaOperation(*key, *first[key][2:]) for key in order),
        steps=tuple(complete),
        ranks=np.array([[ranks[replica, stage] for stage in range(stages)] for replica in replicas]),
        start_s=values[..., 0],
        duration_s=values[..., 1],
        source=path,
        warnings=tuple(warnings),
    )
