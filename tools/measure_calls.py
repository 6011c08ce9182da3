# mypy: ignore-errors
"""Time what the CPU spends on calls of PyTorch, forward and backward, where the GPU limits none of them.

    python tools/measure_calls.py FOLDER [--seconds 240] [--device cuda]

All cases run in every round, in another random order, as different operators follow each other in a program: in a loop
of one call its code would stay in the caches. Forward, each call is timed by itself. Backward, all results are
differentiated together; a hook at the last node of each case takes the time, so that a case has the time of its nodes
with the accumulation of its weights' gradients. Writes ``calls.jsonl``: for each case and mode the quartiles of both,
in microseconds, and the CPU's pace before each part (``time_small_step`` of measure_scripts.py).
"""

import argparse
import json
import random
import sys
import time
import tomllib
from itertools import pairwise
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parent))

GROUPS = tomllib.loads((Path(__file__).parent / "calls.toml").read_text())
CASES = {text: group for group, texts in GROUPS.items() for text in texts}
MODES = ("fp32", "bf16", "autocast", "no_grad")
OPTIMIZERS = {
    "AdamW foreach": ("AdamW", {"foreach": True}), "AdamW": ("AdamW", {}), "AdamW fused": ("AdamW", {"fused": True}),
    "AdamW loop": ("AdamW", {"foreach": False}), "Adam": ("Adam", {}), "Adam amsgrad": ("Adam", {"amsgrad": True}),
    "SGD": ("SGD", {"lr": 1e-3}), "SGD momentum": ("SGD", {"lr": 1e-3, "momentum": 0.9}),
    "SGD nesterov decay": ("SGD", {"lr": 1e-3, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    "SGD fused": ("SGD", {"lr": 1e-3, "momentum": 0.9, "fused": True}), "RMSprop": ("RMSprop", {}),
    "Adagrad": ("Adagrad", {}), "NAdam": ("NAdam", {}), "RAdam": ("RAdam", {}), "Adamax": ("Adamax", {}),
    "Adadelta": ("Adadelta", {}), "Adafactor": ("Adafactor", {}), "Rprop": ("Rprop", {}), "ASGD": ("ASGD", {}),
    "RMSprop centered momentum": ("RMSprop", {"centered": True, "momentum": 0.9}),
}  # fmt: skip
COUNTS = (10, 60, 200)  # tensors


def make_names(device: str, dtype_name: str) -> dict:
    """Return everything that the cases read: sources of their inputs, weights, modules and functions of Python."""
    import torch
    from torch import nn
    from torch.utils.checkpoint import checkpoint

    dtype = getattr(torch, dtype_name)

    def data(*shape):
        return torch.rand(shape, device=device, dtype=dtype) + 0.1

    def weight(*shape):
        return (0.1 * data(*shape)).requires_grad_()

    class Square(torch.autograd.Function):
        @staticmethod
        def forward(context, x):
            context.save_for_backward(x)
            return x * x

        @staticmethod
        def backward(context, gradient):
            return 2.0 * gradient * context.saved_tensors[0]

    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale, self.heads, self.rate = nn.Parameter(torch.ones(64)), 4, 0.5

        def forward(self, x, flag=None):
            if flag is not None and self.training:
                return x
            return x * self.scale

    class Deep(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, x):
            return self.inner(x)

    nested = nn.Identity()
    for _ in range(5):
        nested = Deep(nested)
    holder = Own()

    def attributes():
        return (holder.scale, holder.heads, holder.rate, holder.scale, holder.heads, holder.rate, holder.scale,
                holder.heads, holder.rate, holder.training)  # fmt: skip

    def lines(a, b):
        c = a + b
        d = c * a
        e = d - b
        f = e if e > a else b
        g = [c, d, e, f]
        h = len(g)
        i = g[0] + g[1]
        j = (i, h)
        k, m = j
        n = {"a": k, "b": m}
        o = n["a"] + n.get("b", 0)
        p = str(o)
        q = p + "x"
        r = isinstance(q, str)
        s = r and o > 2
        t = max(a, b)
        u = t // 2
        v = u == 2
        w = not v
        return s, w

    def leaf(a):
        return a + 1

    def calls(a):
        a = leaf(a)
        a = leaf(a)
        a = leaf(a)
        a = leaf(a)
        a = leaf(a)
        a = leaf(a)
        a = leaf(a)
        a = leaf(a)
        a = leaf(a)
        return leaf(a)

    def items():
        return sum([value * 2 for value in range(20)])

    def put(x, place, value):
        x = x.clone()
        x[place] = value
        return x

    def hooked(x):
        x = x * 2.0
        if x.requires_grad:
            x.register_hook(lambda gradient: gradient)
        return x

    def build(module):
        return module.to(device=device, dtype=dtype)

    first, second = (build(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))) for _ in range(2))
    state = {
        "torch": torch, "F": nn.functional, "nn": nn, "device": device, "Square": Square, "put": put, "hooked": hooked,
        "nested": nested, "attributes": attributes, "lines": lines, "calls": calls, "items": items,
        "zeros": lambda: torch.zeros(64, 64, device=device, dtype=dtype),
        "ids": torch.arange(64, device=device), "offsets": torch.arange(0, 64, 8, device=device),
        "many": torch.randint(0, 64, (4096,), device=device),
        "places": torch.arange(64, device=device).repeat(64, 1).contiguous(), "mask": data(64, 64) > 0.6,
        "half": torch.full((64, 64), 0.5, device=device, dtype=dtype), "signs": torch.ones(64, device=device),
        "causal": torch.zeros(16, 16, device=device, dtype=dtype), "small": torch.full((64,), 2, device=device),
        "w": weight(64, 64), "b": weight(64), "g": weight(64), "w3": weight(4, 64, 64), "wl": weight(8, 8, 3),
        "wi": weight(8, 8, 3, 3), "bi": weight(8), "gi": weight(8), "wd": weight(8, 1, 3, 3),
        "wc": weight(4, 4, 3, 3, 3),
        "mi": torch.zeros(8, device=device), "vi": torch.ones(8, device=device), "mx": torch.zeros(64, device=device),
        "vx": torch.ones(64, device=device), "grid": 2 * data(4, 16, 16, 2) - 1,
        "grid3": 2 * data(2, 8, 8, 8, 3) - 1, "wg": weight(8, 1, 3),
        "turn": torch.ones(64, 32, device=device, dtype=torch.complex64),
        "steps": torch.rand(16, 4, 12, device=device).log_softmax(-1),
        "words": torch.ones(4, 5, dtype=torch.long, device=device),
        "lengths": torch.full((4,), 16), "short": torch.full((4,), 5), "host": torch.rand(64, 64),
        "pinned": torch.rand(64, 64).pin_memory() if device == "cuda" else torch.rand(64, 64),
        "linear": build(nn.Linear(64, 64)), "norm": build(nn.LayerNorm(64)),
        "conv": build(nn.Conv2d(8, 8, 3, padding=1)),
        "batch": build(nn.BatchNorm2d(8)), "drop": nn.Dropout(0.1), "relu": nn.ReLU(), "own": build(holder),
        "four": nn.Sequential(*(nn.Identity() for _ in range(4))), "table": build(nn.Embedding(64, 64)),
        "bag": build(nn.EmbeddingBag(64, 64)), "lstm": build(nn.LSTM(64, 64, batch_first=True)),
        "gru": build(nn.GRU(64, 64, batch_first=True)), "cell": build(nn.LSTMCell(64, 64)),
        "grucell": build(nn.GRUCell(64, 64)), "mha": build(nn.MultiheadAttention(64, 4, batch_first=True)),
        "encoder": build(nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)),
        "decoder": build(nn.TransformerDecoderLayer(64, 4, 128, batch_first=True)), "rms": build(nn.RMSNorm(64)),
        "mlp": build(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))),
        "block": build(nn.Sequential(nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU())),
        "cross": nn.CrossEntropyLoss(), "checkpointed": lambda x: checkpoint(first, x, use_reentrant=False),
        "reentrant": lambda x: checkpoint(second, x, use_reentrant=True),
    }  # fmt: skip
    state["sources"] = {
        "x": data(64, 64), "y": data(64, 64), "v": data(64), "seq": data(4, 16, 64), "heads": data(4, 4, 16, 16),
        "img": data(4, 8, 16, 16), "line": data(4, 8, 32), "cube": data(2, 4, 8, 8, 8), "scores": data(4, 16, 16),
        "pairs": data(64, 32, 2).float(),
    }  # fmt: skip
    for source in state["sources"].values():
        source.requires_grad_()
    return state


class Case:
    """A call with inputs, weights and modules of its own, so that no gradients are added up between cases."""

    def __init__(self, text: str, names: dict) -> None:
        import copy

        import torch

        self.text, self.names = text, dict(names)
        self.function = eval(f"lambda: {text}", self.names)
        used, seen = [*self.function.__code__.co_names], set()
        while used:
            name = used.pop()
            value = names.get(name)
            if name in seen or value is None:
                continue
            seen.add(name)
            if isinstance(value, torch.nn.Module):
                self.names[name] = copy.deepcopy(value)
            elif isinstance(value, torch.Tensor) and value.requires_grad:
                self.names[name] = value.detach().clone().requires_grad_()
        self.sources = {
            name: names["sources"][name] for name in self.function.__code__.co_names if name in names["sources"]
        }
        self.weights = [
            weight for name in seen if isinstance(value := self.names[name], torch.Tensor | torch.nn.Module)
            for weight in (value.parameters() if isinstance(value, torch.nn.Module) else (value,))
            if weight.requires_grad
        ]  # fmt: skip

    def refresh(self, mode: str) -> None:
        """Make new inputs that are results of an operator, as those within a program are."""
        for name, source in self.sources.items():
            self.names[name] = source * 1.0 if mode != "no_grad" else source.detach()

    def clear(self) -> None:
        for weight in self.weights:
            weight.grad = None


def functions_of(names: dict, cases) -> dict:
    return {text: Case(text, names) for text in cases}


def in_mode(mode: str):
    import contextlib

    import torch

    stack = contextlib.ExitStack()
    if mode == "no_grad":
        stack.enter_context(torch.no_grad())
    if mode == "autocast":
        stack.enter_context(torch.autocast(torch.device("cuda").type, torch.bfloat16))
    return stack


def graph_of(result):
    """Return the first result that has a graph."""
    import torch

    results = result if isinstance(result, tuple | list) else (result,)
    return next((one for one in results if isinstance(one, torch.Tensor) and one.grad_fn is not None), None)


def find_usable(names: dict, mode: str, device: str) -> list:
    """Return the cases that run in this mode, backward too."""
    import torch

    usable = []
    for text, case in functions_of(names, CASES).items():
        try:
            with in_mode(mode):
                case.refresh(mode)
                result = graph_of(case.function())
            if result is not None:
                result.backward(torch.ones_like(result))
            if device == "cuda":
                torch.cuda.synchronize()
            usable.append(text)
        except Exception as error:  # an operator without this format
            print("left out", mode, text, str(error).splitlines()[0][:120], flush=True)
    return usable


def run_round(names: dict, functions: dict, mode: str, order: list, hooks: bool, wait) -> tuple[dict, dict, float]:
    """Return the nanoseconds of each case forward, and backward with what the engine takes in all."""
    import torch

    clock = time.perf_counter_ns
    forward, results = {}, []
    with in_mode(mode):
        for text in order:
            functions[text].refresh(mode)
        wait()
        for number, text in enumerate(order):
            function = functions[text].function
            if number % 40 == 39 or CASES[text] == "wait":
                wait()
            began = clock()
            result = function()
            forward[text] = clock() - began
            if mode != "no_grad" and (last := graph_of(result)) is not None:
                results.append((text, last))
    backward, stamps = {}, []
    if not results:
        return forward, backward, 0.0
    gradients = [torch.ones_like(last) for _, last in results]
    handles = []
    if hooks:
        for text, last in results:
            handles.append(last.grad_fn.register_prehook(lambda _, text=text: stamps.append((text, clock()))))
    wait()
    began = clock()
    torch.autograd.backward([last for _, last in results], gradients)
    total = clock() - began
    wait()
    for (text, start), (_, end) in pairwise(stamps):
        backward[text] = end - start
    for handle in handles:
        handle.remove()
    for text in order:
        functions[text].clear()
    for source in names["sources"].values():
        source.grad = None
    return forward, backward, total


def quartiles(values: list) -> list:
    values = sorted(values)
    return [round(values[len(values) * part // 4] / 1e3, 2) for part in (1, 2, 3)]


def measure_cases(mode: str, device: str, rounds: int, wait) -> tuple[list, dict]:
    names = make_names(device, "bfloat16" if mode == "bf16" else "float32")
    usable = find_usable(names, mode, device)
    functions = functions_of(names, usable)
    draws = random.Random(0)
    forward, backward = {text: [] for text in usable}, {text: [] for text in usable}
    totals = {True: [], False: []}
    nodes = 0
    for number in range(rounds + 3):
        order = usable[:]
        draws.shuffle(order)
        hooks = number % 4 != 3
        own, gradients, total = run_round(names, functions, mode, order, hooks, wait)
        if number < 3:
            continue
        for text, took in own.items():
            forward[text].append(took)
        for text, took in gradients.items():
            backward[text].append(took)
        nodes = max(nodes, len(gradients))
        totals[hooks].append(total)
    rows = [
        {"case": text, "group": CASES[text], "mode": mode, "forward_us": quartiles(forward[text]),
         "backward_us": quartiles(backward[text]) if backward[text] else None}
        for text in usable
    ]  # fmt: skip
    summary = {"mode": mode, "hooked": nodes}
    if nodes:
        summary |= {"total_hooked_us": quartiles(totals[True]), "total_us": quartiles(totals[False])}
    return rows, summary


def measure_alone(device: str, wait, runs: int = 100) -> list:
    """Return the time of single calls in a loop of each, which stay in the caches."""
    names = make_names(device, "float32")
    rows = []
    for text in find_usable(names, "fp32", device):
        case = Case(text, names)
        case.refresh("fp32")
        took = []
        for number in range(runs):
            if number % 20 == 0 or CASES[text] == "wait":
                wait()
            began = time.perf_counter_ns()
            case.function()
            took.append(time.perf_counter_ns() - began)
        rows.append({"case": text, "group": CASES[text], "mode": "alone", "forward_us": quartiles(took[10:])})
    return rows


def measure_updates(device: str, wait, rounds: int = 25) -> list:
    """Return the time of optimizers, clipping and what surrounds a backward, each after other calls."""
    import torch

    names = make_names(device, "float32")
    mixed = [text for text in find_usable(names, "fp32", device) if CASES[text] != "wait"]
    functions, draws = functions_of(names, mixed), random.Random(1)
    timed, tiny = {}, torch.rand(64, 64, device=device, requires_grad=True)

    def parameters(count):
        own = [torch.nn.Parameter(torch.rand(64, 64 if number % 2 else 1, device=device)) for number in range(count)]
        for one in own:
            one.grad = torch.rand_like(one)
        return own

    for count in COUNTS:
        for name, (kind, options) in OPTIMIZERS.items():
            optimizer = getattr(torch.optim, kind)(parameters(count), **options)
            timed[f"{name} step", count] = optimizer.step
        own = parameters(count)
        timed["clip", count] = lambda own=own: torch.nn.utils.clip_grad_norm_(own, 1.0)
        timed["clip value", count] = lambda own=own: torch.nn.utils.clip_grad_value_(own, 1.0)
        timed["norm of gradients", count] = lambda own=own: torch.nn.utils.get_total_norm([p.grad for p in own])
        cleared = torch.optim.SGD(parameters(count), lr=1e-3)
        timed["zero_grad", count] = cleared.zero_grad
        filled = torch.optim.SGD(parameters(count), lr=1e-3)
        timed["zero_grad to zeros", count] = lambda own=filled: own.zero_grad(set_to_none=False)
        averages = parameters(count)

        def average(own=own, averages=averages):
            with torch.no_grad():
                for mine, one in zip(averages, own, strict=True):
                    mine.lerp_(one, 0.01)

        def average_lists(own=own, averages=averages):
            with torch.no_grad():
                torch._foreach_lerp_([*averages], [*own], 0.01)

        timed["average loop", count], timed["average foreach", count] = average, average_lists
        scaler = torch.amp.GradScaler("cuda", enabled=device == "cuda")
        scaled = torch.optim.SGD(parameters(count), lr=1e-6)

        def scale(scaler=scaler, scaled=scaled):
            scaler.scale(tiny.sum())
            scaler.unscale_(scaled)
            scaler.step(scaled)
            scaler.update()

        timed["scaler", count] = scale
        loop = parameters(count)

        def accumulate(own=loop):
            sum((one.sum() for one in own[1:]), own[0].sum()).backward()

        timed["accumulate", count] = accumulate
    timed["backward of one node", 1] = lambda: tiny.view(4096).backward(torch.ones_like(tiny).view(4096))
    timed["grad of one node", 1] = lambda: torch.autograd.grad(tiny.view(4096), tiny, torch.ones_like(tiny).view(4096))
    scheduled = torch.optim.SGD(parameters(4), lr=1e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(scheduled, 1000)
    scheduled.step()
    timed["schedule", 1] = schedule.step
    schedule_lambda = torch.optim.lr_scheduler.LambdaLR(scheduled, lambda step: 1.0)
    timed["schedule lambda", 1] = schedule_lambda.step

    def enter(context):
        def run():
            with context():
                pass

        return run

    timed["no_grad", 1] = enter(torch.no_grad)
    timed["autocast", 1] = enter(lambda: torch.autocast("cuda", torch.bfloat16))
    dataset = torch.utils.data.TensorDataset(torch.rand(100_000, 8), torch.zeros(100_000))
    batches = iter(torch.utils.data.DataLoader(dataset, batch_size=64, shuffle=True))
    timed["loader of 64", 1] = lambda: next(batches)
    took = {key: [] for key in timed}
    for number in range(rounds + 3):
        order = list(timed)
        draws.shuffle(order)
        for key in order:
            for text in draws.sample(mixed, 12):
                functions[text].refresh("fp32")
                functions[text].function()
            wait()
            began = time.perf_counter_ns()
            timed[key]()
            own = time.perf_counter_ns() - began
            if number > 2:
                took[key].append(own)
        wait()
    return [{"case": name, "count": count, "us": quartiles(values)} for (name, count), values in took.items()]


def main() -> None:
    parser = argparse.ArgumentParser(description="Time the CPU's calls of PyTorch.")
    parser.add_argument("folder")
    parser.add_argument("--seconds", type=float, default=240.0)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rounds", type=int, default=60)
    arguments = parser.parse_args()
    import torch
    from measure_scripts import time_small_step

    folder, device = Path(arguments.folder), arguments.device
    folder.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    until = time.time() + arguments.seconds
    with (folder / "calls.jsonl").open("w") as lines:

        def write(rows):
            for row in rows:
                lines.write(json.dumps(row) + "\n")
            lines.flush()

        def pace(part):
            if device == "cuda":
                write([{"part": part, "small_step_ms": median(time_small_step() for _ in range(3))}])

        first, turn = True, 0
        while time.time() < until:
            for mode in MODES:
                pace(f"{mode} {turn}")
                rows, summary = measure_cases(mode, device, arguments.rounds, wait)
                write([{**row, "turn": turn} for row in rows] + [{**summary, "turn": turn}])
                print(mode, turn, len(rows), round(until - time.time()), flush=True)
                if time.time() > until:
                    break
            if first:
                pace("updates")
                write(measure_updates(device, wait))
                print("updates", round(until - time.time()), flush=True)
                pace("alone")
                write(measure_alone(device, wait))
                first = False
            turn += 1
        pace("end")


if __name__ == "__main__":
    main()
