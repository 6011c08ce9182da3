"""The prints of an OptimusPrime log into a RunLog."""

import re
from collections.abc import Iterable
from math import ceil
from typing import Any

import numpy as np
import numpy.typing as npt

from stepcast.inputs.errors import FormatError
from stepcast.inputs.optimus.blocks import NO_BLOCK, Attribution, Tokens, attribute
from stepcast.inputs.optimus.scan import Scan
from stepcast.ir.layout import Layout
from stepcast.ir.limits import OPTIMUS
from stepcast.ir.runlog import LayerTimes, RunLog
from stepcast.units import MS

STAGE_END = re.compile(r"\(([0-9]{1,6}), '([A-Za-z0-9_.]{1,200})'\)")


def read_log(pieces: Iterable[str], path: str) -> RunLog:
    """The log whose text is *pieces*, cut only between lines."""
    scan = Scan(pieces)
    tokens = scan.tokens
    if not len(tokens.ranks) and not scan.batches:
        raise FormatError(
            "holds no usable record; expected '[rank:R stage:S] transformer-block(module) forward time' with "
            "layer[...] records, or '| epoch ... | ms/batch ...' lines",
            path,
        )
    attribution = attribute(tokens)
    warnings = [f"{count} damaged {what} left out" for what, count in scan.damaged.items()]
    warnings += doubts(tokens, scan.steps, attribution)
    layout, sizes = settle(scan.once, tokens, warnings)
    if "parameters" not in scan.once:
        warnings.append("the number of parameters is not printed")
    return RunLog(
        layout=layout,
        micro_batch=sizes["micro_batch"],
        micro_batches=sizes["micro_batches"],
        global_batch=sizes["global_batch"],
        parameters=int(scan.once.get("parameters", "0").replace(",", "")),
        layer_times=layer_times(scan, tokens, attribution),
        batches=tuple(scan.batches),
        blocks=len(tokens.ranks),
        stage_ends=stage_ends(scan.once.get("stage_ends", "")),
        source=path,
        facts=other_facts(scan),
        warnings=tuple(warnings),
    )


def layer_times(scan: Scan, tokens: Tokens, attribution: Attribution) -> LayerTimes:
    kept = np.flatnonzero(attribution.block_of != NO_BLOCK)
    block_of, sign = attribution.block_of[kept], tokens.sign[kept]
    return LayerTimes(
        layers=tuple(scan.signs.layers),
        rank_of=tokens.ranks[block_of].astype(np.int32),
        stage_of=tokens.stages[block_of].astype(np.int32),
        step_of=scan.steps[block_of].astype(np.int32),
        layer_of=np.array(scan.signs.layer_of, dtype=np.int32)[sign],
        block_of=block_of.astype(np.int32),
        ops_of=np.array(scan.signs.ops_of, dtype=np.int32)[sign],
        total_s=scan.total_ms[kept] * MS,
    )


def doubts(tokens: Tokens, steps: npt.NDArray[np.int64], attribution: Attribution) -> list[str]:
    """What is missing or could not be attributed for certain."""
    blocks = len(tokens.ranks)
    warnings = []
    if attribution.orphans:
        warnings.append(f"{attribution.orphans} layer records belong to no report and are left out")
    if attribution.ambiguous:
        warnings.append(
            f"{attribution.ambiguous} glued records could be of several ranks of one stage; taken in order"
        )
    if not blocks:
        return [*warnings, "no layer times are printed"]
    found = np.bincount(attribution.block_of[attribution.block_of >= 0], minlength=blocks)
    wanted = {stage: len(signature) for stage, signature in attribution.signatures.items()}
    short = int((found < np.array([wanted.get(stage, 1) for stage in tokens.stages.tolist()])).sum())
    if short:
        warnings.append(f"{short} of {blocks} reports lack a layer record")
    # Every rank that reports at all should do so every step.
    expected = len(set(tokens.ranks.tolist())) * len(set(steps.tolist()))
    distinct = len(set((tokens.ranks * 10**9 + steps).tolist()))
    if distinct < expected:
        warnings.append(f"{expected - distinct} of {expected} reports (rank and step) are missing")
    if blocks > distinct:
        warnings.append(f"{blocks - distinct} reports (rank and step) are printed twice")
    return warnings


def settle(once: dict[str, str], tokens: Tokens, warnings: list[str]) -> tuple[Layout, dict[str, int]]:
    """Layout and batch sizes as printed; what is missing follows from the rest, with a warning."""
    stages = int(tokens.stages.max()) + 1 if len(tokens.stages) else 1
    words = ("world", "tp", "dp", "pp", "mbs", "gbs", "gas")
    printed = {word: int(once[word]) for word in words if int(once.get(word, "0")) > 0}
    tp, dp, pp = printed.get("tp", 1), printed.get("dp", 1), printed.get("pp", stages)
    micro_batch = printed.get("mbs", 1)
    micro_batches = printed.get("gas", max(1, printed.get("gbs", 1) // (micro_batch * dp)))
    global_batch = printed.get("gbs", micro_batch * micro_batches * dp)
    missing = [word.upper() for word in words if word not in printed]
    if missing:
        warnings.append(f"not printed, taken from the rest or as 1: {', '.join(missing)}")
    if printed.get("world", tp * dp * pp) != tp * dp * pp:
        warnings.append(f"world size {printed['world']} is not TP {tp} x DP {dp} x PP {pp}")
    if stages > pp:
        warnings.append(f"stage {stages - 1} reported, but PP is {pp}")
    ran = samples_taken(once, dp, global_batch)
    if global_batch != micro_batch * micro_batches * dp:
        warnings.append(f"GBS {global_batch} is not MBS {micro_batch} x GAS {micro_batches} x DP {dp}")
    if ran != global_batch:
        # A rank cuts what it takes into GAS micro-batches, whatever MBS says (get_input of schedule.py).
        micro_batch = ceil(ran / (dp * micro_batches))
        warnings.append(
            f"GBS {global_batch} and MBS {printed.get('mbs', 1)} are printed, but a step took {ran} samples: "
            f"read as {micro_batches} micro-batches of {micro_batch}"
        )
    sizes = {"micro_batch": micro_batch, "micro_batches": micro_batches, "global_batch": ran}
    try:
        OPTIMUS.check(pp * micro_batches)
        return Layout(tp=tp, dp=dp, pp=pp), sizes
    except ValueError as error:
        raise FormatError(str(error)) from None


def samples_taken(once: dict[str, str], dp: int, global_batch: int) -> int:
    """By all ranks in a step: as a rank counted them, or as the length of an epoch shows.

    A loader over one of *dp* equal shares of the data has as many batches as its batch size makes of them;
    *global_batch* where that is one such size.
    """
    if int(once.get("taken", "0")) > 0:
        return int(once["taken"])
    batches = int(once.get("batches_per_epoch", "0"))
    share = ceil(int(once.get("data_size", "0")) / dp)
    if not 0 < batches <= share or batches == ceil(share / max(1, global_batch // dp)):
        return global_batch
    return dp * ceil(share / batches)


def stage_ends(text: str) -> tuple[str, ...]:
    ends = {int(stage): name for stage, name in STAGE_END.findall(text)}
    return tuple(ends[stage] for stage in sorted(ends))


def other_facts(scan: Scan) -> dict[str, Any]:
    facts: dict[str, Any] = {"finished_ranks": len(scan.finished)}
    for word in ("world", "data_size", "batches_per_epoch"):
        if word in scan.once:
            facts[word] = int(scan.once[word])
    if "elapsed_s" in scan.once:
        facts["elapsed_s"] = float(scan.once["elapsed_s"])
    if "model_class" in scan.once:
        facts["model_class"] = scan.once["model_class"]
    return facts
