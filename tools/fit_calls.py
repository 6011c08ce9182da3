# mypy: ignore-errors
"""Fit the CPU's time of single operators to measured calls, and write the tables of data/fits/calls.toml.

    PYTHONPATH=src python tools/fit_calls.py [calls.jsonl of measure_calls.py]

Each call is traced without a GPU: the operators that it runs forward, and those and the nodes of autograd that run
backward. Times of operators follow by least squares of relative errors, none of them negative; most calls run one
operator, which is then as measured. Without a file the measured calls are those of data/captured/calls.csv; with one
they are replaced. Times are multiplied by PACE, from the host that was measured to the mean of all visits.
"""

import csv
import json
import sys
from collections import defaultdict
from pathlib import Path
from statistics import median

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))

import measure_calls
import torch

from stepcast.pytorch.capture.emulation import EmulatedGpu
from stepcast.pytorch.capture.kernels import works_of
from stepcast.pytorch.capture.program import _answer_as_gpu
from stepcast.pytorch.capture.tracer import Moment, Tracer

DATA = Path(__file__).parents[1] / "src" / "stepcast" / "data"
CALLS, FIT = DATA / "captured" / "calls.csv", DATA / "fits" / "calls.toml"
MODES = measure_calls.MODES
# Small steps took 6.9 ms in that visit, 7.85 in the mean of thirteen; programs take 5 % longer than their calls, for
# the Python between them.
PACE = 1.05 * 7.85 / 6.9
HOOK_US = 1.0  # of the hook that takes the time of a case backward
# Of several results, with a loop of their own, or whose time is not that of the operators that are traced.
LEFT_OUT = {"four(x)", "nested(x)", "checkpointed(x)", "reentrant(x)", "hooked(x)", "lstm(seq)[0]", "gru(seq)[0]",
            "encoder(seq)", "decoder(seq, seq)", "x.detach().cpu()", "Square.apply(x)",
            "torch.autograd.grad((x * x).sum(), x)",
            "torch.autograd.grad((x * x).sum(), x, create_graph=True)"}  # fmt: skip
NODE, ACCUMULATED, MODULE, WAIT = "node", "accumulated", "module", "wait"
# Microseconds that an operator takes about: forward and backward, with a kernel and without; how strongly it does.
ABOUT = {("forward", True): 19.0, ("forward", False): 7.0, ("backward", True): 11.0, ("backward", False): 2.5}
ABOUT_OTHERS = {NODE: 6.0, ACCUMULATED: 5.0, MODULE: 8.0, WAIT: 15.0, "add_": 9.0}
# No operator takes less: a kernel is launched, or Python and the dispatcher are passed at least.
LEAST = {("forward", True): 6.0, ("forward", False): 1.0, ("backward", True): 5.0, ("backward", False): 0.5}
STRENGTH, STRENGTHS = 0.05, {NODE: 0.3, ACCUMULATED: 0.3, "view": 0.3, "t": 0.3, "add_": 1.0}


def collect_calls(path: str) -> None:
    """Write the medians of all turns as a table of calls by mode, forward and backward."""
    found = defaultdict(lambda: defaultdict(list))
    for line in Path(path).read_text().splitlines():
        row = json.loads(line)
        if "forward_us" in row:
            found[row["case"]][row["mode"]].append(row["forward_us"][1])
            if row.get("backward_us"):
                found[row["case"]][f"backward {row['mode']}"].append(row["backward_us"][1])
        elif "us" in row:
            found[f"{row['case']} ({row['count']})"]["alone"].append(row["us"][1])
    columns = [*MODES, "alone", *(f"backward {mode}" for mode in MODES[:3])]
    with CALLS.open("w", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(["call", *columns])
        for call, own in found.items():
            table.writerow([call, *(f"{median(own[name]):.2f}" if own[name] else "" for name in columns)])


def count_nodes(result, inputs) -> tuple[int, int]:
    """Return the nodes of autograd from *result* to *inputs*, and those that accumulate gradients of weights."""
    seen, waiting, last = set(), [result.grad_fn], {tensor.grad_fn for tensor in inputs}
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen and node not in last:
            seen.add(node)
            waiting += [following for following, _ in node.next_functions]
    accumulated = sum("AccumulateGrad" in node.name() for node in seen)
    return len(seen) - accumulated, accumulated


def trace_cases(mode: str):
    """Yield each call with the operators that it runs: forward and backward, each with whether it launches a kernel."""
    tracer, entered = Tracer({}), [0]
    hook = torch.nn.modules.module.register_module_forward_pre_hook(lambda *_: entered.__setitem__(0, entered[0] + 1))
    events = tracer.trace.events

    def count(start, extra):
        return [(event.name, bool(works_of(event))) for event in events[start:]] + [
            (name, False) for name, times in extra.items() for _ in range(times)
        ]

    with _answer_as_gpu(), tracer, EmulatedGpu() as gpu:
        names = measure_calls.make_names("meta", "bfloat16" if mode == "bf16" else "float32")
        for text in (text for text in measure_calls.CASES if text not in LEFT_OUT):
            tracer.moment, backward = Moment.FORWARD, None
            try:
                case = measure_calls.Case(text, names)
                with measure_calls.in_mode(mode):
                    case.refresh(mode)
                    inputs = [case.names[name] for name in case.sources]
                    start, waits, entered[0] = len(events), len(tracer.trace.host_waits), 0
                    sequence = torch.autograd._get_sequence_nr()
                    result = measure_calls.graph_of(case.function())
                gpu.casts.clear()
                has_node = torch.autograd._get_sequence_nr() > sequence
                forward = count(start, {MODULE: entered[0], WAIT: len(tracer.trace.host_waits) - waits})
                if result is not None and mode != "no_grad":
                    nodes, accumulated = count_nodes(result, inputs)
                    ones, tracer.moment = torch.ones_like(result), Moment.BACKWARD
                    start, targets = len(events), (*inputs, *case.weights)
                    torch.autograd.graph._engine_run_backward(
                        (result,), (ones,), False, False, targets, allow_unreachable=True, accumulate_grad=False
                    )
                    backward = count(start, {NODE: nodes, ACCUMULATED: accumulated})
            except Exception:  # sizes that follow from values, and formats that an operator does not have
                continue
            yield text, forward, has_node, backward
    hook.remove()


def solve(rows, times, about, least, rounds=3000) -> dict:
    """Return a time for each name that minimises the relative errors, close to *about* where little is known, and no
    less than *least*.
    """
    names = sorted({name for row in rows for name in row})
    counts = np.array([[row.get(name, 0.0) for name in names] for row in rows])
    weights = 1.0 / np.maximum(times, 5.0)
    left, right = counts * weights[:, None], np.array(times) * weights
    prior = np.array([about(name) for name in names])
    strength = np.array([STRENGTHS.get(name, STRENGTH) for name in names]) / np.maximum(prior, 1.0)
    square, product = left.T @ left + np.diag(strength**2), left.T @ right + strength**2 * prior
    found, lowest = prior.copy(), [least(name) for name in names]
    for _ in range(rounds):
        for place in range(len(names)):
            rest = product[place] - square[place] @ found + square[place, place] * found[place]
            found[place] = max(lowest[place], rest / square[place, place])
    errors = np.abs(counts @ found / times - 1)
    print(f"{len(times)} calls: {errors.mean():.1%} off, median {np.median(errors):.1%}")
    return dict(zip(names, found, strict=True))


def add_up(operators, share=1.0) -> dict:
    counts = defaultdict(float)
    for name, _ in operators:
        counts[name] += share
    return counts


def main() -> None:
    if len(sys.argv) > 1:
        collect_calls(sys.argv[1])
    measured = {
        row.pop("call"): {name: float(us) for name, us in row.items() if us} for row in csv.DictReader(CALLS.open())
    }
    traced = {mode: list(trace_cases(mode)) for mode in MODES}
    both = [measured[text] for text, _, has_node, _ in traced["fp32"] if has_node]
    without_node = median(own["no_grad"] / own["fp32"] for own in both if "no_grad" in own)
    launches = {"forward": {}, "backward": {}}
    rows, alone, gradients = [], [], []
    for mode, cases in traced.items():
        for text, forward, has_node, backward in cases:
            launches["forward"] |= dict(forward)
            own, share = measured.get(text, {}), 1.0 if has_node else without_node
            if mode in own and forward:
                rows.append((add_up(forward, share), own[mode]))
            if mode == "fp32" and "alone" in own and forward:
                alone.append((add_up(forward, share), own["alone"]))
            if backward and f"backward {mode}" in own:
                launches["backward"] |= dict(backward)
                gradients.append((add_up(backward), own[f"backward {mode}"] - HOOK_US))

    def about(phase):
        return lambda name: ABOUT_OTHERS.get(name, ABOUT[phase, launches[phase].get(name, True)])

    def least(phase, share=1.0):
        return lambda name: share * LEAST[phase, launches[phase].get(name, False)]

    among = solve(*zip(*rows, strict=True), about("forward"), least("forward"))
    usual = 0.42
    repeated = solve(*zip(*alone, strict=True), lambda name: usual * among.get(name, 15.0), least("forward", usual))
    backward = solve(*zip(*gradients, strict=True), about("backward"), least("backward"))
    shares = {
        kernel: median(repeated[name] / among[name] for name in repeated if launches["forward"].get(name) is kernel)
        for kernel in (True, False)
    }
    tables = {
        "forward": {name: (us, repeated.get(name, shares[launches["forward"].get(name, False)] * us))
                    for name, us in among.items() if name != WAIT},
        "backward": {name: (us, shares[launches["backward"].get(name, False)] * us)
                     for name, us in backward.items() if name not in (NODE, ACCUMULATED)},
    }  # fmt: skip
    print(f"without_node {without_node:.2f}, node {PACE * backward[NODE]:.1f}, accumulated "
          f"{PACE * backward[ACCUMULATED]:.1f}")  # fmt: skip
    for phase, table in tables.items():
        own = [times for name, times in table.items() if launches[phase].get(name) and times[0] < 40]
        table["kernel"] = tuple(median(times[place] for times in own) for place in (0, 1))
        print(f"\n[{phase}]")
        for name, (us, least_us) in sorted(table.items()):
            print(f"{name} = [{PACE * us:.3g}, {PACE * min(us, least_us):.3g}]")


if __name__ == "__main__":
    main()
