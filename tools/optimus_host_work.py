"""How much host work a Llama layer is under OptimusPrime, in plain operators, without and with DTensor.

Times forward, backward and Adam of traced Llamas of two depths on a CPU, with tensors so small that only the
host counts and with collectives that do nothing, and prints microseconds per layer and per plain operator.
The counts of data/fits/constants.toml come from here. Needs torch==2.5.1 and transformers==4.46.2:

    python tools/optimus_host_work.py [tp]
"""

import inspect
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import transformers.utils.fx as hf_fx
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM

SHALLOW, DEEP, REPEATS = 2, 6, 60
COLUMNS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
ROWS = ("o_proj", "down_proj")


def traced(layers: int) -> Any:
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=32,
        intermediate_size=128,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        use_cache=False,
    )
    model = LlamaForCausalLM(config)
    parameters = inspect.signature(model.forward).parameters.values()
    fixed = {each.name: each.default for each in parameters if each.name != "input_ids"}
    return torch.fx.GraphModule(model, hf_fx.HFTracer().trace(model, concrete_args=fixed))


def sharded(layers: int, mesh: Any) -> Any:
    graph = traced(layers)
    names = [name for name, _ in graph.named_modules()]
    split = {name: ColwiseParallel() for name in names if name.endswith(COLUMNS)}
    split |= {name: RowwiseParallel() for name in names if name.endswith(ROWS)}
    for node in graph.graph.nodes:
        shapes_heads = node.op == "call_method" and node.name.startswith("view")
        if shapes_heads and str(node.args[0]).endswith(COLUMNS[:3]):
            node.args = (*node.args[:3], node.args[3] // mesh.size(), *node.args[4:])
    graph.recompile()
    return parallelize_module(graph, mesh, split)


def timed_us(model: Any) -> tuple[float, float, float]:
    """Forward, backward and one Adam step; a low quantile, because other programs only ever add."""
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-5, foreach=False)
    tokens = torch.zeros((1, 4), dtype=torch.long)
    samples: list[list[float]] = [[], [], []]
    for _ in range(REPEATS):
        marks = [time.process_time()]
        loss = model(tokens)["logits"].sum()
        marks.append(time.process_time())
        loss.backward()
        marks.append(time.process_time())
        optimizer.step()
        marks.append(time.process_time())
        for sample, start, stop in zip(samples, marks, marks[1:], strict=False):
            sample.append(1e6 * (stop - start))
    forward, backward, update = (statistics.quantiles(sample[10:], n=5)[0] for sample in samples)
    return forward, backward, update


class Count(TorchDispatchMode):  # type: ignore[misc]
    """Counts operators."""

    calls = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        Count.calls += 1
        return function(*args, **(kwargs or {}))


def operators(layers: int) -> tuple[int, int]:
    model = traced(layers)
    Count.calls = 0
    with Count():
        loss = model(torch.zeros((1, 4), dtype=torch.long))["logits"].sum()
    forward, Count.calls = Count.calls, 0
    with Count():
        loss.backward()
    return forward, Count.calls


def per_layer(measure: Callable[[int], tuple[float, ...]]) -> list[float]:
    return [(deep - shallow) / (DEEP - SHALLOW) for shallow, deep in zip(measure(SHALLOW), measure(DEEP), strict=True)]


def main() -> None:
    torch.set_num_threads(1)
    ranks = int(sys.argv[1]) if len(sys.argv) > 1 else 2
    counts = per_layer(operators)
    plain = per_layer(lambda layers: timed_us(traced(layers)))
    operator_us = sum(plain[:2]) / sum(counts)
    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    mesh = init_device_mesh("cpu", (ranks,))
    split = per_layer(lambda layers: timed_us(sharded(layers, mesh)))
    print(f"operators per layer: forward {counts[0]:.0f}, backward {counts[1]:.0f}; {operator_us:.2f} us each")
    for name, times in (("plain", plain), (f"sharded over {ranks}", split)):
        shown = ", ".join(f"{time_us:.0f} us = {time_us / operator_us:.0f} operators" for time_us in times)
        print(f"{name}: forward, backward, Adam: {shown}")


if __name__ == "__main__":
    main()
