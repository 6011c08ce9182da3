"""Rows of the h200 set in the words of the library: a model, a strategy and a framework.

All were measured in plain PyTorch or with torch.compile, weights, gradients and the moments of a fused AdamW
in one format, without clipping, on one batch of random tokens that are its targets too. Where such a model's
head is its embedding, drawn with unit variance as PyTorch does, it tells each token from the first step on:
the loss and all gradients are zero (tools/measure_updates.py: 8.4 ps for each weight updated, as in these
rows, where gradients that are not zero take 5.2 to 5.5).
"""

from collections.abc import Mapping

from stepcast.ir.dtype import DType
from stepcast.ir.framework import Execution, Framework, Kernels
from stepcast.ir.layout import Layout
from stepcast.ir.model import Model
from stepcast.ir.optimizer import Optimizer
from stepcast.ir.strategy import Recompute, RecomputeKind, Strategy
from stepcast.models.table import model_of
from stepcast.validate.unseen import unseen_share

Record = Mapping[str, str]
SIZES = {"layers": "layers", "hidden": "hidden", "heads": "heads", "kv_heads": "kv", "ffn": "ffn"}
GPT = {
    "gated": False,
    "activation": "gelu",
    "norm": "layer+bias",
    "position": "learned",
    "biases": ["qkv", "attention_output", "mlp"],
}
POSITIONS = 1024  # at least, of those that are learnt
BLOCK_VOCAB = 1024  # of a model around a block, whose ends are left out


def row_model(row: Record) -> Model:
    """A GPT- or Llama-style model; a row of a block has one layer."""
    if row["kind"] not in ("gpt", "llama"):
        raise ValueError(f"kind must be gpt or llama, not {row['kind']!r}")
    seq, experts = int(row["seq"]), int(float(row.get("experts") or 0))
    table: dict[str, object] = {field: int(row.get(column) or 1) for field, column in SIZES.items()}
    table |= {
        "vocab": int(row.get("vocab") or BLOCK_VOCAB),
        "max_seq": seq,
        "tied": row.get("tied") == "True",
    }
    if row["kind"] == "gpt":
        table |= GPT | {"max_seq": max(POSITIONS, seq)}
    if experts:
        routed = {"count": experts, "top_k": int(float(row["topk"])), "ffn": table["ffn"]}
        table |= {"experts": routed, "ffn": 0}
    return model_of(row.get("model") or row["kind"], table)


def row_strategy(row: Record) -> Strategy:
    """One GPU. A block has the shards of a tensor-parallel rank, and adds to gradients that are there."""
    batch = int(row.get("batch") or row["micro_batch"])
    block = "micro_batch" in row
    full = row.get("recompute") == "full"
    seq = int(row["seq"])
    return Strategy(
        Layout(tp=int(row.get("tp") or 1)),
        batch,
        batch * int(row.get("steps") or (2 if block else 1)),
        seq,
        precision=DType(row["dtype"]),
        recompute=Recompute(RecomputeKind.FULL if full else RecomputeKind.NONE),
        zero_gradients=0.0 if block else _zero_gradients(row_model(row), batch * seq),
    )


def _zero_gradients(model: Model, tokens: int) -> float:
    return 1.0 if model.tied else unseen_share(model, tokens)


def row_framework(row: Record) -> Framework:
    """PyTorch as it is, or compiled."""
    dtype, compiled = DType(row["dtype"]), row.get("compiled", "0") in ("1", "True")
    return Framework(
        name="pytorch",
        kernels=Kernels.COMPILED if compiled else Kernels.PLAIN,
        execution=Execution.EAGER,
        gradient_dtype=dtype,
        optimizer=Optimizer(moment_dtype=dtype, master_weights=False, clips=False),
        flash_attention=row.get("attention", "flash") == "flash",
    )
