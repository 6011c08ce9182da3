"""SimAI / AICB workload text from a Workload."""

from collections.abc import Sequence
from itertools import chain

from stepcast.inputs.simai import BARE_GROUPS, KINDS, SUFFIXES, parse_header
from stepcast.inputs.source import FormatError, expect
from stepcast.ir.layout import Group
from stepcast.ir.work import Collective, Recorded
from stepcast.ir.workload import Layer, Op, Phase, Workload
from stepcast.units import NS

KIND_WORDS = {kind: word for word, kind in KINDS.items()}
GROUP_SUFFIXES = {group: f"_{suffix}" for suffix, group in SUFFIXES.items()}
DEFAULT_POLICY = "HYBRID_TRANSFORMER_FWD_IN_BCKWD"


def write(workload: Workload) -> bytes:
    """Return the text AICB would write: micro-batches and repeated layers spelled out."""
    if not workload.uniform:
        raise ValueError(
            f"SimAI text holds one pipeline stage, and the {workload.layout.pp} of this workload differ; "
            "'stepcast predict ... --to-workload FILE.txt' writes a step as SimAI text"
        )
    stage = workload.stages[0]
    micro_batches = int(workload.note("simai.written_micro_batches") or workload.micro_batches)
    usual, varied = stage.body_layers(), stage.numbered_bodies(micro_batches)
    bodies = (varied.get(micro_batch, usual) for micro_batch in range(micro_batches))
    customized = workload.note("simai.policy") == "HYBRID_CUSTOMIZED"
    lines = [_line(layer, customized) for layer in chain(stage.prologue, *bodies, stage.epilogue)]
    return "\n".join([header_line(workload), str(len(lines)), *lines, ""]).encode()


def header_line(workload: Workload) -> str:
    """Return the header as its file spelt it where it still states the same, else in today's form."""
    original = workload.note("simai.header")
    layout = workload.layout
    if original is not None:
        header = parse_header(original)
        # Its ga may be overruled by what its file wrote out.
        counts = (str(header.micro_batches or 1), workload.note("simai.written_micro_batches"))
        is_same = (header.layout, header.boundary_bytes) == (layout, workload.boundary_bytes)
        if is_same and str(workload.micro_batches) in counts:
            return original
    policy = workload.note("simai.policy") or DEFAULT_POLICY
    boundary = "" if workload.boundary_bytes is None else f" pp_comm: {workload.boundary_bytes}"
    degrees = f"model_parallel_NPU_group: {layout.tp} ep: {layout.ep} pp: {layout.pp} vpp: {layout.vpp}"
    size = f"ga: {workload.micro_batches} all_gpus: {layout.gpus}{boundary}"
    return f"{policy} {degrees} {size} checkpoints: 0 checkpoint_initiates: 0"


def split_ops(ops: Sequence[Op]) -> tuple[float, list[Op]]:
    """Return the recorded seconds of a phase, and its other ops."""
    recorded_s = sum(op.work.duration_s for op in ops if isinstance(op.work, Recorded))
    return recorded_s, [op for op in ops if not isinstance(op.work, Recorded)]


def _line(layer: Layer, customized: bool) -> str:
    notes = dict(layer.notes)
    cells = [layer.name.replace(" ", "_"), notes.get("depends", "-1")]
    for phase, bare_group in zip(Phase, BARE_GROUPS.values(), strict=True):
        cells += _phase_cells(layer, layer.ops(phase), bare_group)
    return "\t".join([*cells, _nanoseconds(layer.process_s), *([notes["policy"]] if customized else [])])


def _phase_cells(layer: Layer, ops: Sequence[Op], bare_group: Group) -> list[str]:
    recorded_s, messages = split_ops(ops)
    if not messages:
        return [_nanoseconds(recorded_s), "NONE", "0"]
    work = messages[0].work
    if len(messages) > 1 or not isinstance(work, Collective):
        kinds = ", ".join(type(op.work).__name__ for op in messages)
        raise FormatError(f"layer {layer.name!r} needs {kinds}: a SimAI line holds one time and one collective")
    expect(work.times <= 1, f"layer {layer.name!r} needs {work.times} collectives: a SimAI line holds one")
    expect(work.kind in KIND_WORDS, f"layer {layer.name!r}: SimAI text has no word for {work.kind}")
    suffixes = {**GROUP_SUFFIXES, bare_group: ""}
    expect(work.group in suffixes, f"layer {layer.name!r}: this SimAI column cannot name the group {work.group}")
    return [_nanoseconds(recorded_s), KIND_WORDS[work.kind] + suffixes[work.group], str(work.size_bytes)]


def _nanoseconds(seconds: float) -> str:
    """Return whole nanoseconds: SimAI misreads every line after one with a fraction."""
    return str(round(seconds / NS))
