"""Training steps on this GPU with activations or the optimizer kept on the host, to check stepcast's against.

    python -m tools.measure_offload OUT.csv

The decoders of ``benchmarks/eager_memory.py``. Of all layers but the last, activations are copied out while
the next one runs and back while that runs backward, as Transformer Engine does; an offloaded AdamW copies
gradients out, updates with PyTorch's fused kernel on the host and copies weights back, tensor by tensor, as
Megatron-Core does. Needs torch and a GPU.
"""

import csv
import sys
import time
from dataclasses import asdict
from typing import Any

import torch

from benchmarks.eager_memory import Case, Model

STEPS = 5
SMALLEST = 1 << 16  # elements of a tensor that is worth a copy
UPDATED = 1 << 28  # elements of the update by itself
CASES = (
    Case("llama", 12, 4096, 32, 8, 14336, 1024, False, 1, 4096),
    Case("llama", 12, 4096, 32, 8, 14336, 1024, False, 1, 16384),
    Case("llama", 16, 2048, 32, 8, 8192, 1024, False, 4, 4096),
    Case("gpt", 24, 2048, 16, 16, 8192, 1024, True, 4, 2048),
)


class Offload:
    def __init__(self, blocks: Any) -> None:
        self.out, self.into = torch.cuda.Stream(), torch.cuda.Stream()
        self.count = len(blocks) - 1
        self.kept: list[dict[int, Any]] = [{} for _ in blocks]
        self.pinned: list[dict[int, Any]] = [{} for _ in blocks]
        self.events: dict[Any, Any] = {}
        self.weights = {each.data_ptr() for each in blocks.parameters()}
        for number, block in enumerate(blocks):
            if number < self.count:
                block.forward = self.wrapped(number, block.forward)
            block.register_full_backward_pre_hook(lambda _m, _g, at=number: self.returned(at))
            block.register_full_backward_hook(lambda _m, _i, _o, at=number: self.kept[at].clear())

    def wrapped(self, number: int, forward: Any) -> Any:
        kept, known = self.kept[number], {}

        def pack(tensor: Any) -> Any:
            if tensor.data_ptr() in self.weights or tensor.numel() < SMALLEST:
                return tensor
            at = known.setdefault((tensor.data_ptr(), tensor.shape, tensor.stride()), len(known))
            kept[at] = tensor.detach()
            return at

        def run(*inputs: Any) -> Any:
            known.clear()
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda at: kept[at] if isinstance(at, int) else at):
                result = forward(*inputs)
            self.sent(number)
            return result

        return run

    def sent(self, number: int) -> None:
        main = torch.cuda.current_stream()
        self.out.wait_stream(main)
        with torch.cuda.stream(self.out):
            for at, tensor in self.kept[number].items():
                if at not in self.pinned[number]:
                    self.pinned[number][at] = torch.empty_like(tensor, device="cpu", pin_memory=True)
                self.pinned[number][at].copy_(tensor, non_blocking=True)
            self.events["out", number] = self.out.record_event()
        if number:
            main.wait_event(self.events["out", number - 1])
            self.kept[number - 1].clear()

    def returned(self, number: int) -> None:
        main = torch.cuda.current_stream()
        if number < self.count:
            main.wait_event(self.events["in", number])
        if number:
            self.into.wait_event(self.events["out", number - 1])
            with torch.cuda.stream(self.into):
                for at, held in self.pinned[number - 1].items():
                    tensor = self.kept[number - 1][at] = held.to("cuda", non_blocking=True)
                    tensor.record_stream(main)
                self.events["in", number - 1] = self.into.record_event()

    @property
    def bytes(self) -> int:
        held = (each for layer in self.pinned for each in layer.values())
        return sum(each.numel() * each.element_size() for each in held)


class HostAdamW:
    def __init__(self, weights: Any) -> None:
        self.weights = list(weights)
        self.master = [torch.nn.Parameter(each.detach().float().cpu().pin_memory()) for each in self.weights]
        for each in self.master:
            each.grad = torch.empty_like(each, pin_memory=True)
        self.updates = [torch.optim.AdamW([each], fused=True) for each in self.master]
        self.out, self.into = torch.cuda.Stream(), torch.cuda.Stream()

    def zero_grad(self, set_to_none: bool) -> None:
        for each in self.weights:
            each.grad = None

    def step(self) -> None:
        self.out.wait_stream(torch.cuda.current_stream())
        events = []
        with torch.cuda.stream(self.out):
            for weight, master in zip(self.weights, self.master, strict=True):
                master.grad.copy_(weight.grad, non_blocking=True)
                events.append(self.out.record_event())
        for weight, master, update, event in zip(self.weights, self.master, self.updates, events, strict=True):
            event.synchronize()
            update.step()
            with torch.cuda.stream(self.into):
                weight.data.copy_(master.data, non_blocking=True)
        torch.cuda.current_stream().wait_stream(self.into)


def update_s() -> float:
    weight = torch.nn.Parameter(torch.zeros(UPDATED))
    weight.grad = torch.ones(UPDATED)
    return _fastest_s(torch.optim.AdamW([weight], fused=True).step)


def measure(case: Case, offload: str) -> dict[str, Any]:
    with torch.device("cuda"):
        model: Any = Model(case).to(dtype=torch.bfloat16)
    moved = Offload(model.blocks) if offload == "activations" else None
    optimizer: Any = HostAdamW(model.parameters()) if offload == "optimizer" else None
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), fused=True)
    tokens = torch.randint(0, case.vocab, (case.batch, case.seq), device="cuda")

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        model(tokens, tokens).backward()
        optimizer.step()

    return {"step_s": _fastest_s(step), "host_bytes": moved.bytes if moved else 0}


def _fastest_s(run: Any) -> float:
    times_s = []
    for _ in range(STEPS):
        torch.cuda.synchronize()
        start_s = time.perf_counter()
        run()
        torch.cuda.synchronize()
        times_s.append(time.perf_counter() - start_s)
    return min(times_s[1:])


def main() -> None:
    with open(sys.argv[1], "w", newline="") as file:
        writer = None
        host = {"update_elements": UPDATED, "update_s": update_s()}
        for case in CASES:
            for offload in ("none", "activations", "optimizer"):
                row = {**asdict(case), "offload": offload, **host, **measure(case, offload)}
                writer = writer or csv.DictWriter(file, row)
                if case is CASES[0] and offload == "none":
                    writer.writeheader()
                writer.writerow(row)
                file.flush()
                print(row, flush=True)
                torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
