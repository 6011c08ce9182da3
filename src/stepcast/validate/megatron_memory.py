"""The megatron-memory set: peak memory of Megatron-LM's functional tests, against what ``memory`` predicts.

A row holds the arguments of a test, most of them in columns; they are read as those of any script.
"""

from dataclasses import replace
from typing import NamedTuple

from stepcast.cost.memory import memory
from stepcast.cost.memory.stages import EXPERT_STREAMS, engine_workspace_bytes
from stepcast.inputs.configs import megatron
from stepcast.inputs.configs.keys import Keys
from stepcast.ir.model_parts import Hybrid
from stepcast.ir.types import FactDict, require
from stepcast.models.catalog import load_model
from stepcast.questions.question import PredictQuestion
from stepcast.questions.runs import ask_with_file, run_of_config, write_command
from stepcast.questions.settle import SettledRun, settle
from stepcast.validate import scoreboard

FILE = "megatron_memory.csv"
PROFILE = "megatron-lm"
CUT_OFF = 500  # characters of further arguments that a row has at most
# Kinds that are no training step of one language model.
OTHER_KINDS = ("non-LLM", "multimodal", "multi-run", "distillation")
LARGE_HIDDEN = 2048
COMMAND = "command"
MAMBA = {"mamba_heads": "mamba-num-heads", "mamba_head_dim": "mamba-head-dim", "state": "mamba-state-dim",
         "groups": "mamba-num-groups"}  # fmt: skip


class MemoryCase(NamedTuple):
    """One test: the run that its arguments describe, those that it spells out, and whether that list is cut off."""

    run: SettledRun
    flags: Keys
    cut_off: bool


def read_case(record: scoreboard.Record) -> MemoryCase:
    """Return the test of a row; a ValueError says why it cannot be predicted."""
    kind, listed = record.get("kind", ""), record.get("other_flags", "")
    require(not kind.startswith(OTHER_KINDS), f"no training step of one language model: {kind.partition(' (')[0]}")
    words = (word.partition("=") for word in listed.split())
    flags = Keys({name: value or True for name, _, value in words}, "megatron")
    for name in ("vocab_padded", "num_gpus", "max_mem_bytes"):
        require(bool(record.get(name)), f"{name} is not stated")
    require("fine-grained-activation-offloading" not in flags, "activations are offloaded")
    latent = [name for name, _ in megatron.LATENT.values()] if "multi-latent-attention" in flags else []
    if missing := [name for name in latent if flags.number(name) is None]:
        raise ValueError(f"--{missing[0]} is not stated")
    cut_off = len(listed) >= CUT_OFF
    arguments = {**flags.values, **state_arguments(record)}
    if cut_off:  # long lists are those of large recent models, which have no dropout
        arguments |= {"attention-dropout": "0", "hidden-dropout": "0"}
    pattern = flags.text("hybrid-layer-pattern", "hybrid-override-pattern").partition("/")[0]
    if pattern:  # a letter for each layer, with a bar between those of different stages and chunks
        arguments["num-layers"] = len(pattern.replace("|", ""))
        arguments.setdefault("num-virtual-stages-per-pipeline-rank", (pattern.count("|") + 1) // int(record["pp"]) or 1)
    file = run_of_config(megatron.read_test(arguments), record["test"])
    given: FactDict = {"gpus": int(float(record["num_gpus"])), "framework": PROFILE}
    given["cluster"] = scoreboard.cluster_of(record["gpu"].partition("-")[0]).name
    if pattern:
        usual = {"mamba_heads": int(record["hidden"]) * 2 // 64, "mamba_head_dim": 64, "state": 128, "groups": 8}
        sizes = {name: flags.number(flag) or usual[name] for name, flag in MAMBA.items()}
        given["model"] = replace(load_model(file.choices["model"]), hybrid=Hybrid(pattern.replace("|", ""), **sizes))
    return MemoryCase(settle(ask_with_file(PredictQuestion, given, file)), flags, cut_off)


def state_arguments(record: scoreboard.Record) -> dict[str, object]:
    """Return the arguments that the columns of a row state."""
    tables = scoreboard.load_table("rows/megatron")
    known = {name: text for name, text in record.items() if text}
    arguments: dict[str, object] = {name: known[column] for column, name in tables["values"].items() if column in known}
    arguments |= {name: True for column, name in tables["on"].items() if known.get(column) == "1"}
    arguments |= {name: True for column, name in tables["off"].items() if known.get(column) != "1"}
    arguments |= {name: value for word, own in tables["words"].items() for name, value in own.items()
                  if word in (known.get("precision"), known.get("transformer_impl"))}  # fmt: skip
    if layout := known.get("pp_layout"):
        arguments["pipeline-model-parallel-layout"] = layout.replace("\\", "")
    if sharded := known.get("fsdp"):
        arguments |= {"use-megatron-fsdp": True, "data-parallel-sharding-strategy": sharded.split()[-1]}
    granularity, _, modules = known.get("recompute", "none").partition("[")
    if not granularity.startswith("none"):
        arguments["recompute-granularity"] = granularity.split()[0]
        arguments |= {"recompute-modules": modules.rstrip("]")} if modules else {}
    return {"group-query-attention": True, **arguments}


def measure_peak_memory(*folders: str) -> scoreboard.Measurements:
    """Compare the tests in ``megatron_memory.csv`` of *folders*, or in these files."""
    needed = ("max_mem_bytes", "test", "kind")
    records = (record for folder in folders for record in scoreboard.read_records(folder, FILE, needed=needed))
    rows, skipped = scoreboard.compare_each(records, compare_case)
    table = scoreboard.columns_of(rows)
    large = {"hidden 2048 and more": table.labels("size") == "large"}
    return scoreboard.Measurements(table, skipped, large, details=(COMMAND, "size"), unit="bytes")


def compare_case(record: scoreboard.Record) -> list[scoreboard.ScoredRow]:
    """Return the bytes that a test had allocated at its peak, and those predicted of its last stage."""
    run, flags, cut_off = read_case(record)
    gpu = run.cluster.gpu
    *_, last = memory(run.model, run.strategy, gpu, run.framework)
    if 0 < float(record.get("mem_bytes") or 0) < last.parameters + last.optimizer:
        raise ValueError("less stays allocated between steps than weights and optimizer states take: another model")
    command = f"{write_command(run)} --explain-memory"
    tags = {
        **{name: record[name] for name in ("kind", "gpu", "software", "hidden")},
        "attention": "flash" if run.framework.flash_attention else "unfused",
        "optimizer": str(run.strategy.sharding),
        "engine": record["transformer_impl"],
        "size": "large" if run.model.hidden >= LARGE_HIDDEN else "small",
        COMMAND: "cannot be expressed: no sizes say which layers are hybrid" if run.model.hybrid else command,
    }
    allocated = last.allocated
    if run.model.experts and "moe-grouped-gemm" not in flags and not cut_off:
        allocated -= EXPERT_STREAMS * engine_workspace_bytes(gpu)  # experts one by one run on one stream
    name = " ".join(record[column] for column in ("id", "test", "gpu", "software"))
    return [scoreboard.ScoredRow(name, float(record["max_mem_bytes"]), allocated, tags)]
