"""The aicb-1.1 dialect against files that AICB wrote."""

import pytest

from stepcast.generate.aicb import aicb_workload
from stepcast.inputs.model_table import model_of
from stepcast.ir.layout import Layout
from stepcast.ir.strategy import Sharding, Strategy, StrategyError
from stepcast.outputs.simai import write
from tests.shared import DATA, ROOT, needs_data

LLAMA = model_of(
    "llama-405b-like", {"layers": 128, "hidden": 16384, "heads": 128, "ffn": 53248, "vocab": 30522, "max_seq": 4096}
)
EXPERTS = model_of(
    "gpt-moe",
    {
        "layers": 96,
        "hidden": 6144,
        "heads": 48,
        "ffn": 0,
        "vocab": 50257,
        "max_seq": 4096,
        "gated": False,
        "experts": {"count": 192, "top_k": 4, "ffn": 16384},
    },
)


def layer_lines(text: str) -> list[list[str]]:
    """Name, depends, collectives with sizes, process time of each layer line; compute times left out."""
    cells = [line.split() for line in text.splitlines()[2:] if line.strip()]
    return [[*row[:2], *row[3:5], *row[6:8], *row[9:12]] for row in cells]


def test_llama_405b_example_line_by_line() -> None:
    strategy = Strategy(Layout(tp=8, pp=16, dp=8), 1, 128, 4096, sequence_parallel=True, sharding=Sharding.ZERO_1)
    theirs = (ROOT / "examples" / "simai-llama-405b.txt").read_text()
    ours = write(aicb_workload(LLAMA, strategy)).decode()
    assert ours.splitlines()[:2] == theirs.splitlines()[:2]
    lines = layer_lines(ours)
    assert len(lines) == 557
    assert lines == layer_lines(theirs)


@needs_data("simai")
def test_simais_mixture_of_experts_line_by_line() -> None:
    layout = Layout(tp=2, ep=16, pp=12, dp=384)
    strategy = Strategy(layout, 1, 384 * 24, 4096, sequence_parallel=True)
    theirs = (DATA / "simai" / "moe_9216gpus.txt").read_text()
    lines = layer_lines(write(aicb_workload(EXPERTS, strategy)).decode())
    assert len(lines) == 1789
    # The file's micro-batches are interleaved (vpp 8); what each consists of is the same.
    assert sorted(lines) == sorted(layer_lines(theirs))


def test_without_sequence_parallelism_layers_are_one_line_each() -> None:
    run = aicb_workload(LLAMA, Strategy(Layout(tp=8, pp=16), 1, 2, 4096))
    names = [layer.name for layer in run.stages[0].body_layers()]
    assert names == ["embedding_layer", *["attention_layer", "mlp_layer"] * 8]
    assert "layernorm" in [layer.name for layer in run.stages[0].prologue]


def test_one_tensor_rank_communicates_nothing_inside_layers() -> None:
    run = aicb_workload(LLAMA, Strategy(Layout(pp=16), 1, 2, 4096))
    for layer in run.stages[0].body_layers():
        assert len(layer.forward) == 1


def test_experts_exchange_without_tensor_parallelism() -> None:
    """AICB refuses experts without its sequence-parallel form; at tp 1 that form has two exchanges a layer."""
    run = aicb_workload(EXPERTS, Strategy(Layout(ep=16, pp=12, dp=384), 1, 384, 4096))
    assert "layernorm" not in [layer.name for layer in run.stages[0].prologue]
    lines = [row for row in layer_lines(write(run).decode()) if row[0] == "mlp_moelayer"]
    assert len(lines) == 7 * 96 // 12
    routed = str(2 * 4096 * 6144 * 4)
    none, exchange = ["NONE", "0"], ["ALLTOALL_EP", routed]
    expected = [none, none, exchange, none, none, exchange, none]
    assert [row[2:4] for row in lines[:7]] == expected
    assert [row[4:6] for row in lines[:7]] == expected


def test_given_times_are_written() -> None:
    strategy = Strategy(Layout(tp=8, pp=16), 1, 2, 4096)
    run = aicb_workload(LLAMA, strategy, {"mlp_layer": (3e-6, 2e-6, 1e-6)})
    line = next(row for row in write(run).decode().splitlines() if row.startswith("mlp_layer"))
    cells = line.split()
    assert (cells[2], cells[5], cells[8]) == ("3000", "2000", "1000")


def test_stages_must_be_equal() -> None:
    with pytest.raises(StrategyError, match="pp 5 does not divide 128 layers"):
        aicb_workload(LLAMA, Strategy(Layout(pp=5), 1, 5, 4096))
