"""Operator tables from a Workload: one micro-batch of one stage, repeated layers once."""

from stepcast.inputs.optable import COLUMNS, ELEMENT
from stepcast.inputs.source import FormatError, expect
from stepcast.ir.layout import Group
from stepcast.ir.work import Collective, Transfer
from stepcast.ir.workload import LAYER_BLOCK, Layer, Phase, Workload
from stepcast.outputs.simai import GROUP_SUFFIXES, KIND_WORDS, split_ops
from stepcast.units import MS


def write(workload: Workload) -> bytes:
    """Return tab-separated rows in the order a reader expects."""
    rows, marked = ["\t".join(COLUMNS)], workload.note(LAYER_BLOCK)
    for stage in workload.stages:
        # A table that marks its one model layer has that layer once.
        times = [1 if marked == str(index) else block.repeat for index, block in enumerate(stage.body)]
        body = [layer for block, count in zip(stage.body, times, strict=True) for layer in [*block.layers] * count]
        for layer in (*stage.prologue, *body, *stage.epilogue):
            cells = [cell for phase in Phase for cell in _phase_cells(layer, phase)]
            rows.append("\t".join([layer.name, *cells, _milliseconds(layer.process_s)]))
    return ("\n".join(rows) + "\n").encode()


def losses(workload: Workload) -> tuple[str, ...]:
    """Return what of *workload* a table does not hold."""
    micro_batches, gpus, stages = workload.micro_batches, workload.layout.gpus, workload.stages
    runs_once = any(stage.prologue or stage.epilogue for stage in stages)
    lost = {
        f"micro-batches: one of {micro_batches} is written": micro_batches > 1,
        f"layout: a table is read as one GPU, and this ran on {gpus:,}": gpus > 1,
        "which stage a row belongs to: the stages follow one another": len(stages) > 1,
        "what runs once per step: its rows are among those of the micro-batch": runs_once,
    }
    return tuple(text for text, is_lost in lost.items() if is_lost)


def _phase_cells(layer: Layer, phase: Phase) -> list[str]:
    recorded_s, messages = split_ops(layer.ops(phase))
    if not messages:
        return [_milliseconds(recorded_s), "None", "0"]
    op, work = messages[0], messages[0].work
    if len(messages) > 1 or (isinstance(work, Collective) and work.times > 1):
        raise FormatError(f"layer {layer.name!r}: an operator table holds one communication per phase")
    if not isinstance(work, Collective | Transfer):
        kind = type(work).__name__
        raise FormatError(f"layer {layer.name!r}: an operator table holds times, not a {kind} to be priced")
    elements, rest = divmod(work.size_bytes, int(ELEMENT.bytes))
    expect(not rest, f"layer {layer.name!r}: {work.size_bytes} bytes are not whole fp32 elements")
    if isinstance(work, Transfer):
        return [_milliseconds(recorded_s), "SENDRECV", str(elements)]
    bare = Group.TP if op.blocking and phase is not Phase.WEIGHT_GRADIENT else Group.DP
    if work.kind not in KIND_WORDS or (work.group != bare and work.group not in GROUP_SUFFIXES):
        raise FormatError(f"layer {layer.name!r}: an operator table has no word for {work.kind} over {work.group} here")
    suffix = "" if work.group == bare else GROUP_SUFFIXES[work.group]
    word = KIND_WORDS[work.kind] + suffix + ("" if op.blocking else "_ASYNC")
    return [_milliseconds(recorded_s), word, str(elements)]


def _milliseconds(seconds: float) -> str:
    return repr(seconds / MS) if seconds else "0"
