"""Memory of Megatron-LM's own functional tests, against the peaks that it expects of their last rank.

Those of dense GPTs that the table describes in full: bf16, Adam, Transformer Engine's layers, nothing
recomputed, one chunk a stage, the loss not fused.
"""

import csv
from collections.abc import Mapping
from dataclasses import replace
from statistics import mean

from stepcast.cost.memory import memory
from stepcast.hardware.catalog import load_gpu
from stepcast.ir.framework import MEGATRON_CORE
from stepcast.ir.layout import Layout
from stepcast.ir.model import Model
from stepcast.ir.model_parts import PositionKind
from stepcast.ir.strategy import Sharding, Strategy
from stepcast.models.catalog import load_model
from tests.shared import DATA, needs_shared

Row = Mapping[str, str]
SIMPLE = {
    "kind": "dense",
    "precision": "bf16",
    "optimizer": "adam",
    "transformer_impl": "transformer_engine",
    "recompute": "none",
    "swiglu": "0",
    "legacy_model": "0",
    "fsdp": "",
    "vpp": "",
    "pp_layout": "",
}
SIZES = ("layers", "hidden", "heads", "kv_heads", "ffn")


def simple(row: Row) -> bool:
    told = row["dp"] and row["vocab_padded"] and "cross-entropy-loss-fusion" not in row["other_flags"]
    return bool(told) and all(row[key] == value for key, value in SIMPLE.items())


def model_of(row: Row) -> Model:
    like = load_model("megatron-22b")
    position = like.position
    if row["position"] != "learned_absolute":
        position = replace(position, kind=PositionKind.ROTARY, count=0)
    sizes = {key: int(row[key]) for key in SIZES}
    sizes |= {"head_dim": int(row["kv_channels"]), "vocab": int(row["vocab_padded"])}
    tied = row["tied_embeddings"] == "1"
    model = replace(like, position=position, tied=tied, **sizes)  # type: ignore[arg-type]
    return model.with_max_seq(int(row["seq"]))


def error(row: Row) -> float:
    layout = Layout(**{key: int(row[key] or 1) for key in ("tp", "pp", "dp", "cp")})
    strategy = Strategy(
        layout,
        int(row["micro_batch"]),
        int(row["global_batch"]),
        int(row["seq"]),
        sequence_parallel=row["sp"] == "1",
        sharding=Sharding.ZERO_1 if row["distributed_optimizer"] == "1" else Sharding.NONE,
    )
    framework = replace(
        MEGATRON_CORE,
        dropout="hidden-dropout=0.0" not in row["other_flags"],
        flash_attention=row["attention_backend"] not in ("unfused", "local"),
    )
    last = memory(model_of(row), strategy, load_gpu(row["gpu"]), framework)[-1]
    return last.allocated / float(row["max_mem_bytes"]) - 1


@needs_shared
def test_peaks_of_megatrons_functional_tests() -> None:
    with open(DATA / "megatron-memory" / "megatron_memory.csv", newline="") as file:
        errors = [error(row) for row in csv.DictReader(file) if simple(row)]
    assert len(errors) >= 60
    assert mean(map(abs, errors)) < 0.065
    assert abs(mean(errors)) < 0.03
