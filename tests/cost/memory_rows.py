"""Rows of measured peaks as a model and a strategy."""

from collections.abc import Mapping
from dataclasses import replace

from stepcast.frameworks.catalog import load_framework
from stepcast.ir.dtype import DType
from stepcast.ir.framework import Execution, Framework, Kernels
from stepcast.ir.layout import Layout
from stepcast.ir.model import Model
from stepcast.ir.stages import even_layers
from stepcast.ir.strategy import NO_RECOMPUTE, Optimizer, Recompute, RecomputeKind, Sharding, Strategy
from stepcast.models.table import model_of

Row = Mapping[str, str]
FULL = Recompute(RecomputeKind.FULL)


def eager_model(row: Row) -> Model:
    """A GPT- or Llama-style model of the h200 set."""
    sizes = {"layers": "layers", "hidden": "hidden", "heads": "heads", "kv_heads": "kv", "ffn": "ffn"}
    table: dict[str, object] = {field: int(row[column]) for field, column in sizes.items()}
    seq = int(row["seq"])
    table |= {"vocab": int(row["vocab"]), "max_seq": seq, "tied": row["tied"] == "True"}
    if row["kind"] == "gpt":
        table |= {"gated": False, "activation": "gelu", "norm": "layer+bias", "position": "learned"}
        table |= {"biases": ["qkv", "attention_output", "mlp"], "max_seq": max(1024, seq)}
    if int(row.get("experts") or 0):
        experts = {"count": int(row["experts"]), "top_k": int(float(row["topk"])), "ffn": int(row["ffn"])}
        table |= {"experts": experts, "ffn": 0}
    return model_of("eager", table)


def eager_strategy(row: Row) -> Strategy:
    """Weights, gradients and moments all in the one precision; gradients freed after each step."""
    batch = int(row["batch"])
    return Strategy(
        Layout(),
        batch,
        batch * int(row.get("steps") or 1),
        int(row["seq"]),
        precision=DType(row["dtype"]),
        recompute=FULL if row["recompute"] == "full" else NO_RECOMPUTE,
    )


def eager_framework(row: Row) -> Framework:
    dtype, compiled = DType(row["dtype"]), row.get("compiled", "0") in ("1", "True")
    return Framework(
        gradient_dtype=dtype,
        optimizer=Optimizer(moment_dtype=dtype, master_weights=False),
        flash_attention=row["attention"] == "flash",
        kernels=Kernels.COMPILED if compiled else Kernels.PLAIN,
        execution=Execution.EAGER,
    )


def _number(row: Row, column: str, default: int = 1) -> int:
    return int(float(row[column])) if row[column] else default


def published_strategy(row: Row, model: Model) -> Strategy:
    """The strategy of a published run; what the row leaves open is the framework's default."""
    tp, pp, cp, ep = (_number(row, key) for key in ("tp", "pp", "cp", "ep"))
    dp = _number(row, "dp", _number(row, "num_gpus") // (tp * pp * cp))
    micro_batch = _number(row, "micro_batch")
    per_round = micro_batch * dp
    deepspeed, titan = "DeepSpeed" in row["framework"], row["framework"] == "torchtitan"
    return Strategy(
        Layout(tp=tp, pp=pp, cp=cp, ep=ep, dp=dp, expert_tp=1 if ep > 1 else 0),
        micro_batch,
        max(1, _number(row, "global_batch") // per_round) * per_round,
        _number(row, "seq"),
        sequence_parallel=tp > 1 and not deepspeed,
        sharding=_sharding(row["zero_fsdp"]),
        recompute=_recompute(row["recompute"], titan),
        precision=DType(row["precision"]),
        stage_layers=() if model.layers % pp == 0 else even_layers(model.layers, pp),
    )


def published_framework(row: Row) -> Framework:
    if row["framework"] == "torchtitan":
        return load_framework("torchtitan")
    if "DeepSpeed" not in row["framework"]:
        return load_framework("megatron-core")
    fp32_gradients = "fp32 grad" in row["zero_fsdp"]
    known = load_framework("megatron-deepspeed-bf16" if fp32_gradients else "megatron-deepspeed")
    return replace(known, gradient_dtype=DType.FP32 if fp32_gradients else DType.BF16)


def _sharding(text: str) -> Sharding:
    if "fsdp" in text:
        return Sharding.FSDP
    return Sharding.ZERO_1 if "zero1" in text else Sharding.NONE


def _recompute(text: str, titan: bool) -> Recompute:
    if text.startswith("full"):
        return FULL
    # torchtitan recomputes selectively unless told otherwise.
    selective = "selective" in text or "SAC" in text or (titan and not text)
    return Recompute(RecomputeKind.SELECTIVE) if selective else NO_RECOMPUTE
