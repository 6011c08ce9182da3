"""SimAI / AICB workload text.

    POLICY key: value ...
    number of layer lines
    name depends  fwd ns, comm, bytes  ig ns, comm, bytes  wg ns, comm, bytes  process ns  [policy]

The body between the once-per-step lines is written out for every micro-batch; it is folded here.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from stepcast.inputs.errors import FormatError
from stepcast.inputs.folding import MicroBatches, fold_layers, fold_micro_batches
from stepcast.inputs.rows import parse_amount, parse_count, shorten
from stepcast.inputs.simai.header import POLICIES, Header, parse_header
from stepcast.inputs.source import Source
from stepcast.ir.group import Group
from stepcast.ir.role import Role
from stepcast.ir.work import Collective, CollectiveKind, Recorded
from stepcast.ir.workload import Layer, Op, Stage, Workload
from stepcast.units import NS

KINDS = {
    "ALLREDUCE": CollectiveKind.ALL_REDUCE,
    "ALLGATHER": CollectiveKind.ALL_GATHER,
    "REDUCESCATTER": CollectiveKind.REDUCE_SCATTER,
    "ALLTOALL": CollectiveKind.ALL_TO_ALL,
    "BROADCAST": CollectiveKind.BROADCAST,
}
SUFFIXES = {"EP": Group.EP, "DP_EP": Group.EXPERT_DP}
# Group of a collective word without a suffix, per column: forward, input gradient, weight gradient.
BARE_GROUPS = (Group.TP, Group.TP, Group.DP)
COLUMNS = ("forward", "input gradient", "weight gradient")

# Lines that AICB writes once per step, before and after the micro-batches.
PROLOGUE_NAMES = frozenset(
    {
        "norm",
        "grad_norm",
        "layernorm",
        "grad_gather",
        "grad_param_comm",
        "grad_param_compute",
        "embedding_grads",
        "moe_grad_norm1",
        "moe_grad_norm2",
    }
)
OPTIMIZER_NAMES = frozenset(f"optimizer{index}" for index in (1, 2, 3, 4))
EPILOGUE_NAMES = frozenset(
    {"embedding_norm"} | {f"cross_entropy{index}" for index in (1, 2, 3)} | OPTIMIZER_NAMES
)
# First line of each micro-batch.
MICRO_BATCH_START = "embedding_layer"


# Columns as written: equal ones become one object.
OpsKey = tuple[str, str, str, int]


def looks_like(head: str) -> bool:
    words = head.split(maxsplit=1)
    return bool(words) and words[0] in POLICIES


def read(source: Source) -> Workload:
    """The workload in *source*, micro-batches and layers folded."""
    lines = enumerate(source.each_line(), 1)
    header_line = next(lines, (1, ""))[1]
    header = parse_header(header_line)
    count_line = next(lines, None)
    if count_line is None:
        raise FormatError("file ends after its header; expected the number of layer lines", line=1)
    declared = parse_count(count_line[1].strip(), "number of layer lines", 2)
    layers = _parse_layers(lines, 13 if header.policy == "HYBRID_CUSTOMIZED" else 12)
    if len(layers) != declared:
        raise FormatError(f"declares {declared} layer lines but holds {len(layers)}", line=2)
    if not layers:
        raise FormatError("holds no layer lines; expected at least one", line=2)
    for index in header.checkpoints + header.checkpoint_initiates:
        if index >= len(layers):
            raise FormatError(f"checkpoint names layer {index}, but the file has {len(layers)}", line=1)
    return _assemble(header, layers, header_line, source.path)


def _parse_layers(lines: Iterable[tuple[int, str]], columns: int) -> list[Layer]:
    """Every layer line; equal lines become one object."""
    known: dict[str, Layer] = {}
    ops: dict[OpsKey, tuple[Op, ...]] = {}
    layers: list[Layer] = []
    for number, line in lines:
        layer = known.get(line)
        if layer is None:
            tokens = line.split()
            if not tokens:
                continue
            layer = known[line] = _parse_layer(tokens, columns, number, ops)
        layers.append(layer)
    return layers


def _parse_layer(tokens: list[str], columns: int, line: int, known: dict[OpsKey, tuple[Op, ...]]) -> Layer:
    if len(tokens) != columns:
        raise FormatError(f"has {len(tokens)} columns; expected {columns}", line=line)
    phases = []
    for column, bare_group in enumerate(BARE_GROUPS):
        compute, word, size = tokens[2 + 3 * column : 5 + 3 * column]
        key = (compute, word, size, column)
        if key not in known:
            known[key] = _parse_ops(compute, word, size, bare_group, line=line, column=COLUMNS[column])
        phases.append(known[key])
    notes = []
    if tokens[1] != "-1":
        notes.append(("depends", tokens[1]))
    if columns == 13:
        if tokens[12] not in POLICIES:
            raise FormatError(
                f"unknown layer policy {shorten(tokens[12])}; expected one of {', '.join(POLICIES)}",
                line=line,
            )
        notes.append(("policy", tokens[12]))
    process_s = parse_amount(tokens[11], "process time", line) * NS
    role = Role.OPTIMIZER if tokens[0] in OPTIMIZER_NAMES else None
    return Layer(tokens[0], phases[0], phases[1], phases[2], process_s, tuple(notes), role=role)


def _parse_ops(
    compute: str, word: str, size: str, bare_group: Group, *, line: int, column: str
) -> tuple[Op, ...]:
    """The computation of one column, and its communication if there is one."""
    computed = Op("", Recorded(parse_amount(compute, f"{column} compute time", line) * NS))
    size_bytes = parse_count(size, f"{column} size", line)
    if word == "NONE":
        return (computed,)
    kind, _, suffix = word.partition("_")
    if kind not in KINDS or (suffix and suffix not in SUFFIXES):
        expected = f"NONE, {', '.join(KINDS)}, bare or with _EP or _DP_EP"
        raise FormatError(f"unknown collective {shorten(word)}; expected {expected}", line=line)
    collective = Collective(KINDS[kind], size_bytes, SUFFIXES.get(suffix, bare_group))
    return (computed, Op(collective.kind, collective))


class _Sections(NamedTuple):
    prologue: list[Layer]
    body: list[Layer]
    epilogue: list[Layer]


def _split(layers: list[Layer]) -> _Sections:
    """Once-per-step lines at both ends, the micro-batches between."""
    start, end = 0, len(layers)
    while start < end and layers[start].name in PROLOGUE_NAMES:
        start += 1
    while end > start and layers[end - 1].name in EPILOGUE_NAMES:
        end -= 1
    return _Sections(layers[:start], layers[start:end], layers[end:])


def _assemble(header: Header, layers: list[Layer], header_line: str, path: str) -> Workload:
    sections = _split(layers)
    warnings = [f"header key {key!r} is not known and was left out" for key in header.unknown_keys]
    declared = header.micro_batches or 1
    folded = _fold_micro_batches(sections.body, declared)
    written = folded.copies
    micro_batches = declared
    if written not in (1, declared):
        micro_batches = written
        warnings.append(
            f"the header says ga: {declared} but {written} micro-batches are written out; {written} is used"
        )
    elif written == 1 and declared > 1:
        warnings.append(f"one micro-batch is written out and stands for all {declared} of the header's ga")
    layout = header.layout
    if header.gpus is not None and layout.gpus != header.gpus:
        warnings.append(f"all_gpus {header.gpus} is not a multiple of tp x pp; dp is taken as {layout.dp}")
    stage = Stage(
        body=fold_layers(folded.base),
        prologue=tuple(sections.prologue),
        epilogue=tuple(sections.epilogue),
        variations=folded.variations,
    )
    return Workload(
        stages=(stage,),
        layout=layout,
        micro_batches=micro_batches,
        boundary_bytes=header.boundary_bytes,
        name=_file_stem(path),
        source="simai",
        notes=(
            ("lines", str(len(layers))),
            ("simai.header", header_line),
            ("simai.policy", header.policy),
            ("simai.written_micro_batches", str(written)),
        ),
        warnings=tuple(warnings),
    )


def _fold_micro_batches(body: Sequence[Layer], declared: int) -> MicroBatches:
    """The micro-batches the body spells out: as many as declared, or as many as begin."""
    starts = sum(layer.name == MICRO_BATCH_START for layer in body)
    for count in (declared, starts):
        if count > 1 and (folded := fold_micro_batches(body, count)):
            return folded
    return MicroBatches(body, 1, ())


def _file_stem(path: str) -> str:
    return path.replace("\\", "/").rsplit("/", 1)[-1].rsplit(".", 1)[0]
