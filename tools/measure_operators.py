# mypy: ignore-errors
"""Time single operators on a GPU, forward and backward: the sum of the durations of their kernels.

    python tools/measure_operators.py FOLDER [--cases tools/operators.toml] [--seconds 240]

A case is ``EXPRESSION | OPERANDS | FORMAT``, as in data/captured/single_operators.csv: ``x.softmax(0) | x=64x4096 |
bf16``. An operand ``4096<1000`` is 4,096 ids below 1,000; the format may add ``last`` (channels last) and ``bench``
(cuDNN chooses by timing). A short kernel that waits marks where a case begins, so that one profile holds many. Writes
``operators.jsonl``, a line for each case and phase: microseconds, the number of kernels, the CPU's microseconds
(among other kernels of the same case), and the longest kernels.
"""

import argparse
import json
import random
import time
import tomllib
from itertools import product
from pathlib import Path
from statistics import median

REPEATS, CHUNK = 3, 24
MARK = "spin_kernel"


def list_cases(path: Path) -> list[str]:
    """Return all cases of a file: each group has every expression with every operand in every format."""
    groups = tomllib.loads(path.read_text())["group"]
    return [
        " | ".join(case)
        for group in groups
        for case in product(group["expressions"], group["operands"], group["formats"])
    ]


class OperatorCase:
    """An operator with operands of its own; on the device "meta" it has no data."""

    def __init__(self, text: str, device: str) -> None:
        import torch

        self.text, self.weights = text, []
        expression, operands, form = text.split(" | ")
        self.words = form.split()
        self.dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[self.words[0]]
        self.device, self.modules = device, {}
        pairs = [each.partition("=") for each in operands.split(";")]
        self.operands = {name: self.make_operand(sizes) for name, _, sizes in pairs}
        names = {"torch": torch, "F": torch.nn.functional, "rnn": self.run_recurrent, **self.operands}
        self.function = eval(f"lambda: {expression}", names)

    def make_operand(self, text: str):
        import torch

        sizes, _, ids_below = text.partition("<")
        shape = tuple(map(int, sizes.split("x")))
        if ids_below:
            if self.device == "meta":
                return torch.empty(shape, device="meta", dtype=torch.int64)
            return torch.randint(int(ids_below), shape, device=self.device)
        layouts = {4: torch.channels_last, 5: torch.channels_last_3d} if "last" in self.words else {}
        layout = layouts.get(len(shape), torch.contiguous_format)
        data = torch.empty(shape, device=self.device, dtype=self.dtype).contiguous(memory_format=layout)
        return data.normal_().requires_grad_()

    def run_recurrent(self, kind, data, hidden, layers=1, bidirectional=False):
        """Return the results of an LSTM, GRU or RNN of all steps, batch first."""
        import torch

        if kind not in self.modules:
            module = getattr(torch.nn, kind)(data.shape[-1], hidden, layers, batch_first=True,
                                             bidirectional=bidirectional)  # fmt: skip
            self.modules[kind] = module.to(device=self.device, dtype=self.dtype)
            self.weights += module.parameters()
        return self.modules[kind](data)[0]

    def forward(self):
        return self.function()

    def prepare_gradient(self, result):
        """Return the arguments of the gradients of *result*, or None where it has none."""
        import torch

        if not result.requires_grad:
            return None
        wanted = [tensor for tensor in self.operands.values() if tensor.requires_grad]
        return (result,), (*wanted, *self.weights), (torch.ones_like(result),)


def time_case(case: OperatorCase, times: dict) -> None:
    """Run a case forward and backward, each after a mark."""
    import torch

    for phase in ("f", "b"):
        for _ in range(REPEATS):
            if phase == "b":
                arguments = case.prepare_gradient(case.forward())
                if arguments is None:
                    return
                torch.cuda.synchronize()
            torch.cuda._sleep(100_000)
            began = time.perf_counter()
            result = case.forward() if phase == "f" else torch.autograd.grad(*arguments, allow_unused=True)
            times.setdefault((case.text, phase), []).append(1e6 * (time.perf_counter() - began))
            torch.cuda._sleep(1000)
            torch.cuda.synchronize()
            del result


def read_kernels(profiler) -> list[list[tuple[str, float]]]:
    """Return the kernels between two marks, in the order in which they ran."""
    import torch

    cuda = torch.autograd.DeviceType.CUDA
    events = [event for event in profiler.profiler.kineto_results.events() if event.device_type() == cuda]
    parts, inside = [], False
    for event in sorted(events, key=lambda event: event.start_ns()):
        if MARK in event.name():
            inside = not inside
            parts += [[]] if inside else []
        elif inside:
            parts[-1].append((event.name(), event.duration_ns() / 1e3))
    return parts


def measure_chunk(texts: list[str], file) -> None:
    import torch
    from torch.profiler import ProfilerActivity, profile

    ready = []
    for text in texts:
        torch.backends.cudnn.benchmark = "bench" in text.rpartition(" | ")[2].split()
        try:
            case = OperatorCase(text, "cuda")
            for _ in range(2):
                arguments = case.prepare_gradient(case.forward())
                if arguments is not None:
                    torch.autograd.grad(*arguments, allow_unused=True)
            torch.cuda.synchronize()
            ready.append(case)
        except Exception as error:  # formats that an operator does not have, too little memory
            print("left out:", text, str(error)[:120].replace("\n", " "), flush=True)
        arguments = None
    times: dict = {}
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for case in ready:
            torch.backends.cudnn.benchmark = "bench" in case.words
            time_case(case, times)
    parts = read_kernels(profiler)
    if len(parts) != sum(map(len, times.values())):
        print("marks are missing:", len(parts), sum(map(len, times.values())), flush=True)
        return
    for (text, phase), cpu in times.items():
        own, parts = parts[: len(cpu)], parts[len(cpu) :]
        total = sorted(own, key=lambda kernels: sum(us for _, us in kernels))[len(own) // 2]
        longest = sorted(total, key=lambda kernel: -kernel[1])[:3]
        line = {"operator": f"{text} {phase}", "us": round(sum(us for _, us in total), 2), "kernels": len(total),
                "cpu_us": round(median(cpu), 1), "longest": [[name[:90], us] for name, us in longest]}  # fmt: skip
        file.write(json.dumps(line) + "\n")
    file.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description="Time single operators on a GPU.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--cases", type=Path, default=Path(__file__).parent / "operators.toml")
    parser.add_argument("--seconds", type=float, default=240.0)
    arguments = parser.parse_args()
    until = time.time() + arguments.seconds
    import torch

    arguments.folder.mkdir(parents=True, exist_ok=True)
    cases = list_cases(arguments.cases)
    random.Random(1).shuffle(cases)
    with (arguments.folder / "operators.jsonl").open("w") as file:
        for start in range(0, len(cases), CHUNK):
            if time.time() > until:
                print(f"no time left for {len(cases) - start} of {len(cases)} cases", flush=True)
                break
            measure_chunk(cases[start : start + CHUNK], file)
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
