"""The engines on the program of 16 stages, 512 micro-batches, 2 chunks and 80 ops per slot: 2.6 million
tasks.

Bars: folded in at most 0.1 s and at least 50 times faster than a plain heap loop in Python; unfolded at 30
million tasks per second or better; cost linear from 1e5 to 4e6 tasks, which is the most that is written out.
Everything is measured in one run, so the ratios hold on any machine.
"""

import gc
import heapq
import resource
import sys
import time
from collections.abc import Callable
from functools import partial

import numpy as np

from benchmarks.timing import best_of
from stepcast.simulation.engine import simulate, task_times
from stepcast.simulation.messages import SlotKind
from stepcast.simulation.pipeline import pipeline_program
from stepcast.simulation.program import Program
from stepcast.simulation.schedules import make_schedule
from stepcast.simulation.segments import Segment, TimedOp
from stepcast.simulation.timeline import critical_path
from stepcast.simulation.unfolded import simulate_unfolded

LANES = ("compute", "tp")
STAGES, CHUNKS, OPS = 16, 2, 40
SIZES = (100_000, 1_000_000, 3_900_000)  # ir.limits.TASKS is 4,000,000


def stage_segments() -> Callable[[int, tuple[SlotKind, ...]], Segment]:
    """40 compute ops, each followed by a communication op that the next but one compute op waits for."""
    rng = np.random.default_rng(7)
    made: dict[tuple[int, SlotKind], Segment] = {}

    def segment_of(stage: int, phases: tuple[SlotKind, ...]) -> Segment:
        key = stage, phases[0]._replace(first=False, last=False)
        if key not in made:
            seconds = rng.uniform(50e-6, 500e-6, 2 * OPS).tolist()
            ops = []
            for index in range(OPS):
                waits = (2 * index - 3,) if index > 1 else ()
                ops.append(TimedOp("compute", seconds[2 * index], 0, waits, () if index else (0,)))
                ops.append(TimedOp("comm", seconds[2 * index + 1], 1, (2 * index,)))
            made[key] = Segment.of(phases[0].kind.letter, ops, lanes=2, inputs=1, outputs=(2 * OPS - 1,))
        return made[key]

    return segment_of


def benchmark_program(micro_batches: int) -> Program:
    schedule = make_schedule("interleaved", STAGES, micro_batches, CHUNKS)
    return pipeline_program(schedule, LANES, stage_segments())


def heap_loop(program: Program) -> tuple[float, float]:
    """The makespan and the seconds that a plain event loop takes: tasks, counts of what is missing, a
    heap."""
    lanes = len(program.lanes)
    missing, children = [0] * program.tasks, [[] for _ in range(program.tasks)]  # type: list[int], list[list[int]]
    previous: dict[tuple[int, int], int] = {}
    starts = program.task_start.tolist()
    for call, (segment, rank) in enumerate(zip(program.segment.tolist(), program.rank.tolist(), strict=True)):
        shape = program.segments[segment].shape
        for op, waits in enumerate(shape.waits):
            task = starts[call] + op
            for node in waits:
                if node >= shape.first_op:
                    before = starts[call] + node - shape.first_op
                elif node < lanes:
                    before = previous.get((rank, node), -1)
                else:
                    source = int(program.table.source_call[call, node - lanes])
                    outputs = program.segments[program.segment[source]].shape.outputs
                    port = program.table.source_port[call, node - lanes]
                    before = starts[source] + int(outputs[port]) if source >= 0 else -1
                if before >= 0:
                    missing[task] += 1
                    children[before].append(task)
        for lane, last in enumerate(shape.last.tolist()):
            if last >= 0:
                previous[rank, lane] = starts[call] + last
    duration_s = program.task_durations_s().tolist()
    gc.collect()
    began = time.perf_counter()
    heap = [(duration_s[task], task) for task in range(program.tasks) if not missing[task]]
    heapq.heapify(heap)
    now = 0.0
    while heap:
        now, task = heapq.heappop(heap)
        for child in children[task]:
            missing[child] -= 1
            if not missing[child]:
                heapq.heappush(heap, (now + duration_s[child], child))
    return now, time.perf_counter() - began


def peak_gb() -> float:
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9


def verdict(good: bool) -> str:
    return "" if good else "   below the bar"


def run_folded(program: Program) -> None:
    build_s = best_of(lambda: benchmark_program(512))
    folded_s = best_of(lambda: simulate(program))
    run = simulate(program)
    rebuild_s = best_of(lambda: task_times(run), 3)
    path_s = best_of(lambda: critical_path(program, task_times(run)), 3) - rebuild_s
    end_s, heap_s = heap_loop(program)
    error = abs(end_s / run.makespan_s - 1)
    print(f"{program.tasks:,} tasks in {program.calls:,} slots")
    print(f"{'build':24} {build_s:8.3f} s")
    print(f"{'folded':24} {folded_s:8.3f} s{verdict(folded_s <= 0.1)}")
    print(f"{'all task times':24} {rebuild_s:8.3f} s")
    print(f"{'critical path':24} {path_s:8.3f} s")
    print(f"{'heap loop in Python':24} {heap_s:8.3f} s, result differs by {error:.1e}{verdict(error < 1e-12)}")
    print(f"{'heap / folded':24} {heap_s / folded_s:8.1f} x{verdict(heap_s / folded_s >= 50)}")


def run_unfolded() -> None:
    simulate_unfolded(benchmark_program(STAGES))  # compile, or load what was compiled
    print(f"{'unfolded tasks':>14} {'seconds':>9} {'M tasks/s':>10} {'ns/task':>8} {'peak GB':>8}")
    costs = []
    for size in SIZES:
        batches = max(1, round(size / (STAGES * STAGES * CHUNKS * 2 * 2 * OPS))) * STAGES
        program = benchmark_program(batches)
        duration_s = program.task_durations_s()
        jitter = np.random.default_rng(1)
        for part in np.array_split(duration_s, max(1, size // 1_000_000)):
            part *= jitter.lognormal(0.0, 0.05, len(part))
        seconds = best_of(partial(simulate_unfolded, program, duration_s), 3)
        rate, memory = program.tasks / seconds / 1e6, peak_gb()
        costs.append(seconds / program.tasks)
        good = rate >= 30 and memory <= 16
        row = f"{program.tasks:14,} {seconds:9.4f} {rate:10.1f} {1e9 * costs[-1]:8.1f} {memory:8.2f}"
        print(row + verdict(good), flush=True)
        del program, duration_s
    print(f"{'largest / smallest per task':24} {costs[-1] / costs[0]:8.2f} x{verdict(costs[-1] / costs[0] < 3)}")


def run() -> None:
    run_folded(benchmark_program(512))
    gc.collect()
    run_unfolded()


if __name__ == "__main__":
    run()
