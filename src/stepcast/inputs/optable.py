"""Operator tables: one row per operator of one GPU, tab or comma separated.

Times are milliseconds, sizes are elements. A row ``X_grad`` carries the gradient reduction of operator X
and comes before it, so that the backward, which walks the rows in reverse, meets it just after X.
"""

import re
from collections.abc import Sequence

from stepcast.inputs.simai import parse_collective
from stepcast.inputs.source import FormatError, Source, expect, open_table, parse_amount, parse_count, shorten
from stepcast.ir.layout import Group
from stepcast.ir.types import DType
from stepcast.ir.work import Collective, Direction, Recorded, Transfer
from stepcast.ir.workload import LAYER_BLOCK, Block, Layer, Op, Stage, Workload
from stepcast.units import MS

PHASE_NAMES = ("forward", "backward", "weight_grad")
FIELDS = ("compute_time", "comm_type", "comm_size")
COLUMNS = ("name", *(f"{phase}_{field}" for phase in PHASE_NAMES for field in FIELDS), "process_time")
ELEMENT = DType.FP32
WORDS = (
    "None, ALLREDUCE, ALLREDUCE_ASYNC, ALLGATHER, REDUCESCATTER, ALLTOALL, ALLTOALL_EP, "
    "ALLGATHER_DP_EP, REDUCESCATTER_DP_EP, SENDRECV"
)

# A row of model layer i: transformer_h_0_ln_1, model_decoder_layers_0_fc1, encoder_layer_3_output ...
LAYER_ROW = re.compile(r"(?:^|_)(?:h|layers?|blocks?)_(?P<index>\d+)_")
# Layers of the GPT-2 family by hidden size (Radford et al. 2019, table 2).
GPT2_LAYERS = {768: 12, 1024: 24, 1280: 36, 1600: 48}
MOST_KNOWN = 10_000


def read(source: Source) -> Workload:
    """Return the table as a one-stage workload of one micro-batch."""
    names, rows = open_table(source, COLUMNS, ", ".join(COLUMNS))
    expect(names[0] == "name", f"first column is {shorten(names[0])}; expected 'name'", line=1)
    warnings = [f"column {shorten(name)} is not known and was left out" for name in names if name not in COLUMNS]
    places = [tuple(names.index(f"{phase}_{field}") for field in FIELDS) for phase in PHASE_NAMES]
    process = names.index("process_time")
    known: dict[tuple[object, ...], tuple[Op, ...]] = {}  # equal cells share their ops
    layers = []
    for number, row in rows:
        phases = []
        for phase, (time, word, size) in enumerate(places):
            key = (phase, row[time], row[word], row[size])
            if key not in known:
                if len(known) == MOST_KNOWN:  # measured times may all differ
                    known.clear()
                time_ms = parse_amount(row[time].strip(), names[time], number)
                elements = parse_count(row[size].strip(), names[size], number)
                known[key] = (Op("", Recorded(time_ms * MS)), *_messages(row[word].strip(), elements, phase, number))
            phases.append(known[key])
        process_ms = parse_amount(row[process].strip(), "process_time", number)
        layers.append(Layer(row[0], phases[0], phases[1], phases[2], process_ms * MS))
    expect(layers, "table has a header but no rows; expected one row per operator", line=1)
    times = (ops[0].work for layer in layers for ops in (layer.input_gradient, layer.weight_gradient))
    if not any(isinstance(work, Recorded) and work.duration_s for work in times):
        warnings.append(
            "every backward time is 0: the writer left them out. "
            "Give --backward-factor 2 to take backward as twice forward (the usual ratio for matmuls)"
        )
    span = _find_layer([layer.name for layer in layers])
    notes: tuple[tuple[str, str], ...] = (("element_dtype", ELEMENT), ("lines", str(len(layers))))
    start, end = span or (0, len(layers))
    repeat = 1
    if span is not None:
        repeat = _guess_repeat(layers[start:end], warnings)
        notes += ((LAYER_BLOCK, str(int(start > 0))),)
    parts = ((layers[:start], 1), (layers[start:end], repeat), (layers[end:], 1))
    body = tuple(Block(tuple(part), times) for part, times in parts if part)
    return Workload(stages=(Stage(body),), source="optable", notes=notes, warnings=tuple(warnings))


def _messages(word: str, elements: int, phase: int, line: int) -> tuple[Op, ...]:
    """Return the communication at the end of a phase.

    Blocking exchanges outside the weight gradient are tensor parallel, others reduce gradients.
    """
    if word in ("None", "NONE", ""):
        return ()
    blocking, stem = not word.endswith("_ASYNC"), word.removesuffix("_ASYNC")
    size_bytes = elements * int(ELEMENT.bytes)
    if stem == "SENDRECV":
        return (Op(Direction.SEND, Transfer(Direction.SEND, size_bytes), blocking),)
    collective = parse_collective(stem, size_bytes, Group.TP if blocking and phase < 2 else Group.DP)
    if collective is None:
        raise FormatError(f"unknown communication {shorten(word)}; expected one of {WORDS}", line=line)
    return (Op(collective.kind, collective, blocking),)


def _find_layer(names: Sequence[str]) -> tuple[int, int] | None:
    """Return the rows of the only model layer in the table, or None where there are none or several.

    The layer begins at its first row with a layer number and ends where a row of the same module tree (same
    prefix) is outside the numbered layers, such as the final norm, or at the head.
    """
    numbered = {row: match for row, name in enumerate(names) if (match := LAYER_ROW.search(name))}
    if len({match["index"] for match in numbered.values()}) != 1:
        return None
    start, last = min(numbered), max(numbered)
    prefix = names[start][: numbered[start].start()]
    for row, name in enumerate(names[last + 1 :], last + 1):
        if (prefix and name.startswith(prefix)) or name.startswith("lm_head"):
            return start, row
    return start, len(names)


def _guess_repeat(layers: Sequence[Layer], warnings: list[str]) -> int:
    """Return how often the layer repeats, by the hidden size its first norm shows, with a warning either way."""
    norms = (layer for layer in layers if "_h_" in layer.name and "ln" in layer.name)
    works = (op.work for layer in norms for op in layer.input_gradient[1:])
    hidden = next((work.size_bytes // int(2 * ELEMENT.bytes) for work in works if isinstance(work, Collective)), 0)
    if hidden in GPT2_LAYERS:
        count = GPT2_LAYERS[hidden]
        warnings.append(
            f"the table holds one model layer; its names and hidden size {hidden} are GPT-2's, "
            f"so it is run {count} times. State it with --repeat-layers N"
        )
        return count
    warnings.append("the table holds one model layer and runs it once; state how many with --repeat-layers N")
    return 1
