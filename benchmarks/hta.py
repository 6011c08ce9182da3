"""Profiler traces analysed by Holistic Trace Analysis and by stepcast: each figure of both, and the CPU time.

``python -m benchmarks.hta FOLDER ...`` with traces of one run each (needs ``pip install HolisticTraceAnalysis``). HTA
keeps nanoseconds here and counts the last step, as stepcast does. Two folders are also compared with each other.
Bar: figures within 0.1 % of the window, HTA takes at least five times as long.
"""

# ruff: noqa: E501
import gzip
import json
import os
import subprocess
import sys
from pathlib import Path

FASTER, CLOSE = 5.0, 1e-3
HTA = """
import json, sys, time
from hta.trace_analysis import TraceAnalysis
began = time.process_time()
paths = json.loads(sys.argv[1])
analysis = TraceAnalysis(trace_files={int(rank): path for rank, path in paths.items()}, trace_dir="/", include_last_profiler_step=True)
ranks = sorted(map(int, paths))
temporal = analysis.get_temporal_breakdown(visualize=False).set_index("rank")
idle, _ = analysis.get_idle_time_breakdown(ranks=ranks, visualize=False)
kinds, kernels = analysis.get_gpu_kernel_breakdown(visualize=False, num_kernels=10000, duration_ratio=1.0, include_memory_kernels=True)
try:
    overlap = analysis.get_comm_comp_overlap(visualize=False).set_index("rank")["comp_comm_overlap_pctg"].to_dict()
except Exception:
    overlap = {}
figures = {}
for rank in ranks:
    row, waits = temporal.loc[rank], idle[idle["rank"] == rank]
    figures[rank] = {"window": row["kernel_time(us)"], "compute": row["compute_time(us)"], "other kernels": row["non_compute_time(us)"], "idle": row["idle_time(us)"],
                     "idle: host": waits[waits["idle_category"] == "host_wait"]["idle_time"].sum(), "overlap %": overlap.get(rank, float("nan"))}
    own = kernels[kernels["rank"] == rank]
    figures[rank] |= {"kernel " + name: total for name, total in zip(own["name"], own["sum (us)"]) if name != "others"}
print(json.dumps([time.process_time() - began, time.process_time(), figures]))
"""
OURS = """
import json, sys, time
from stepcast.analyze.kineto.analysis import analyze_kineto
from stepcast.inputs.source import Source
from stepcast.inputs.table import read_as_one
began = time.process_time()
facts = analyze_kineto(read_as_one([Source(path) for path in json.loads(sys.argv[1]).values()])[1]).facts()
figures = {}
for rank in facts["ranks"]:
    parts, us = rank["breakdown_s"], 1e6
    whole = rank["communication_s"]
    figures[rank["rank"]] = {"window": us * rank["window_s"], "compute": us * parts["compute"], "other kernels": us * (parts["exposed communication"] + parts["exposed copies"]),
        "idle": us * rank["idle_s"], "idle: host": us * (parts["idle: host"] + parts["idle: data loading"]), "overlap %": 100 * rank["overlapped_communication_s"] / whole if whole else float("nan")}
print(json.dumps([time.process_time() - began, time.process_time(), figures, {row["name"]: 1e6 * row["total_s"] for row in facts["kernels"]}]))
"""


def ask(code: str, paths: dict[int, str]) -> list:  # type: ignore[type-arg]
    """Run *code* three times and return the output of the fastest run; the first may compile modules."""
    environment = {**os.environ, "HTA_DISABLE_NS_ROUNDING": "1", "PYTHONDONTWRITEBYTECODE": ""}
    answers = []
    for _ in range(3):
        command = [sys.executable, "-c", code, json.dumps(paths)]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
        if done.returncode:
            sys.exit(done.stderr[-2000:])
        answers.append(json.loads(done.stdout.splitlines()[-1]))
    return min(answers, key=lambda answer: answer[0])


def compare_run(folder: Path) -> bool:
    """Print both tools' figures of one run; return whether they agree and stepcast is fast enough."""
    files = sorted(path for path in folder.iterdir() if path.name.endswith((".json", ".json.gz")))
    paths = {rank: str(path) for rank, path in enumerate(files)}
    hta_s, hta_all_s, theirs = ask(HTA, paths)
    our_s, our_all_s, ours, kernels = ask(OURS, paths)
    apart = 0
    print(f"{folder.name}: HTA {hta_s:.2f} s, stepcast {our_s:.2f} s of CPU time: {hta_s / our_s:.1f} times")
    print(
        f"  with the start of Python and imports {hta_all_s:.2f} and {our_all_s:.2f} s: {hta_all_s / our_all_s:.1f} times"
    )
    totals: dict[str, float] = {}
    for rank, figures in theirs.items():
        for name, value in figures.items():
            if name.startswith("kernel "):
                totals[name[7:]] = totals.get(name[7:], 0.0) + value
            elif value == value:
                own = ours[rank][name]
                is_close = abs(own - value) <= CLOSE * (100 if "%" in name else figures["window"])
                apart += not is_close
                print(f"  rank {rank} {name:15} {value:14.3f} {own:14.3f}{'' if is_close else '  differs'}")
    shared = [name for name in totals if name in kernels]
    worst = max((abs(totals[name] - kernels[name]) for name in shared), default=0.0)
    print(f"  {len(shared)} of {len(totals)} kernels in both; totals differ by at most {worst:.3f} us")
    return not apart and hta_s >= FASTER * our_s


def compare_traces(before: Path, after: Path) -> bool:
    """Print whether HTA's TraceDiff and stepcast count the same kernels and operators in a step."""
    code = """
import json, sys
from hta.trace_diff import DeviceType, LabeledTrace, TraceDiff
sides, answer = [LabeledTrace(label, trace_dir=folder) for label, folder in zip("ab", json.loads(sys.argv[1]).values())], [0]
for side in sides:
    side.t.parse_traces() if not side.t.is_parsed else None
steps = [side.iterations() for side in sides]
for device in (DeviceType.GPU, DeviceType.CPU):
    rows = TraceDiff.compare_traces(*sides, control_iteration=steps[0], test_iteration=steps[1], device_type=device)
    answer += [["gpu" if device is DeviceType.GPU else "host", name, was / len(steps[0]), now / len(steps[1])] for name, (was, now) in zip(rows.index, rows.iloc[:, [0, 2]].values)]
print(json.dumps(answer))
"""
    theirs = {(on, name): (was, now) for on, name, was, now in ask(code, {0: str(before), 1: str(after)})[1:]}
    files = [str(next(folder.glob("*.json*"))) for folder in (before, after)]
    command = [sys.executable, "-m", "stepcast", "compare", *files, "--json"]
    rows = json.loads(subprocess.run(command, capture_output=True, text=True, check=False).stdout)["kernels"]
    ours = {(row["on"], row["name"]): (row["first_runs"], row["second_runs"]) for row in rows}
    good = True
    # HTA counts annotations of the GPU as operators of the host in whose step they end up; those have both names.
    texts = [
        gzip.decompress(Path(file).read_bytes()) if file.endswith(".gz") else Path(file).read_bytes() for file in files
    ]
    events = [event for text in texts for event in json.loads(text)["traceEvents"]]
    annotations = {event["name"] for event in events if event.get("cat") == "gpu_user_annotation"}
    for on in ("gpu", "host"):
        names = [key for key in theirs if key[0] == on and key[1] not in annotations]
        apart = [key for key in names if ours.get(key, theirs[key]) != theirs[key]]
        listed = sum(key in ours for key in names)
        print(f"diff, {on}: {len(names)} names of HTA, {listed} listed by stepcast, {len(apart)} with other counts")
        for key in apart[:10]:
            print(f"  {key[1][:70]}: HTA {theirs[key]}, stepcast {ours[key]}")
        good = good and not apart
    return good


if __name__ == "__main__":
    folders = [Path(word) for word in sys.argv[1:]] or sys.exit(__doc__)
    good = [compare_run(folder) for folder in folders]
    good += [compare_traces(*folders)] if len(folders) == 2 else []
    sys.exit(not all(good))
