"""SimAI / AICB workload text.

    POLICY key: value ...
    number of layer lines
    name depends  fwd ns, comm, bytes  ig ns, comm, bytes  wg ns, comm, bytes  process ns  [policy]

The body between the once-per-step lines is written out for every micro-batch; it is folded here.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import NamedTuple

from stepcast.inputs.source import FormatError, Source, expect, parse_amount, parse_count, read_words, shorten
from stepcast.ir.layout import Group, Layout
from stepcast.ir.limits import CHUNKS, GPUS, MICRO_BATCHES
from stepcast.ir.types import dataclass
from stepcast.ir.work import Collective, CollectiveKind, Recorded
from stepcast.ir.workload import Block, Layer, Op, Role, Stage, Workload, find_patterns, vary_blocks
from stepcast.units import NS

LINES = {name: tuple(words.split()) for name, words in read_words("configs")["simai_lines"].items()}
POLICIES = LINES["policies"]
COUNT_KEYS = read_words("configs")["simai"]
MOST = {"pp": CHUNKS, "vpp": CHUNKS, "ga": MICRO_BATCHES}
LIST_KEYS = ("checkpoints", "checkpoint_initiates")
# pp_comm is written with and without its colon.
KEY = re.compile(r"([A-Za-z_]\w*):|pp_comm")


@dataclass(frozen=True, slots=True)
class SimaiHeader:
    """The first line: policy, parallel layout and checkpoints; degrees it leaves out are None."""

    policy: str
    tp: int | None = None
    ep: int | None = None
    pp: int | None = None
    vpp: int | None = None
    micro_batches: int | None = None
    gpus: int | None = None
    boundary_bytes: int | None = None
    checkpoints: tuple[int, ...] = ()
    checkpoint_initiates: tuple[int, ...] = ()
    unknown_keys: tuple[str, ...] = ()

    @property
    def layout(self) -> Layout:
        """Return degrees with defaults; data parallelism takes the GPUs that are left, by whole division."""
        tp, pp = self.tp or 1, self.pp or 1
        dp = 1 if self.gpus is None else self.gpus // (tp * pp)
        try:
            return Layout(tp=tp, ep=self.ep or 1, pp=pp, vpp=self.vpp or 1, dp=dp)
        except ValueError as error:
            raise FormatError(str(error), line=1) from None


def parse_header(line: str) -> SimaiHeader:
    """Return the header ``POLICY key: value ...``; keys in any order, the last one wins."""
    tokens = line.split()
    if not tokens or tokens[0] not in POLICIES:
        policy = shorten(tokens[0]) if tokens else "an empty line"
        raise FormatError(f"unknown policy {policy}; expected one of {', '.join(POLICIES)}", line=1)
    values: dict[str, object] = {}
    unknown: list[str] = []
    words = iter(tokens[1:])
    for word in words:
        match = KEY.fullmatch(word)
        if match is None:
            raise FormatError(f"{shorten(word)} where a header key such as 'pp:' was expected", line=1)
        key, value = match[1] or match[0], next(words, None)
        if value is None:
            what = "a count and that many layer numbers" if key in LIST_KEYS else "its value"
            raise FormatError(f"header ends after {key!r}; expected {what}", line=1)
        if key in LIST_KEYS:  # N i1 .. iN
            announced = parse_count(value, key, 1)
            numbers = [*islice(words, announced)]
            expect(len(numbers) == announced, f"{key} announces {announced} layers but lists {len(numbers)}", line=1)
            values[key] = tuple(parse_count(number, key, 1) for number in numbers)
        elif key in COUNT_KEYS:
            count, limit = parse_count(value, key, 1, at_least=1), MOST.get(key, GPUS)
            expect(count <= limit.most, f"{key} is {value}; {limit.message}", line=1)
            values[COUNT_KEYS[key]] = count
        elif key == "pp_comm":
            values["boundary_bytes"] = round(parse_amount(value, key, 1))
        else:
            unknown.append(key)
    header = SimaiHeader(tokens[0], unknown_keys=tuple(unknown), **values)  # type: ignore[arg-type]
    model_gpus = (header.tp or 1) * (header.pp or 1)
    if header.gpus is not None and header.gpus < model_gpus:
        raise FormatError(
            f"all_gpus is {header.gpus}, fewer than tp x pp = {model_gpus}; expected a multiple of it", line=1
        )
    return header


COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "broadcast")
KINDS = {name.replace("-", "").upper(): CollectiveKind(name) for name in COLLECTIVES}
SUFFIXES = {"EP": Group.EP, "DP_EP": Group.EXPERT_DP}
# Group of a collective word without a suffix, per column.
BARE_GROUPS = {"forward": Group.TP, "input gradient": Group.TP, "weight gradient": Group.DP}


def looks_like(head: str) -> bool:
    words = head.split(maxsplit=1)
    return bool(words) and words[0] in POLICIES


def read(source: Source) -> Workload:
    """Return the workload in *source*, micro-batches and layers folded."""
    lines = enumerate(source.each_line(), 1)
    header_line = next(lines, (1, ""))[1]
    header = parse_header(header_line)
    count_line = next(lines, None)
    if count_line is None:
        raise FormatError("file ends after its header; expected the number of layer lines", line=1)
    declared = parse_count(count_line[1].strip(), "number of layer lines", 2)
    columns = 13 if header.policy == "HYBRID_CUSTOMIZED" else 12
    known: dict[str, Layer] = {}
    ops: dict[tuple[str, str, str, int], tuple[Op, ...]] = {}  # equal columns become one object
    layers: list[Layer] = []
    for number, line in lines:
        layer = known.get(line)
        if layer is None:
            tokens = line.split()
            if not tokens:
                continue
            if len(tokens) != columns:
                raise FormatError(f"has {len(tokens)} columns; expected {columns}", line=number)
            phases = []
            for column, (title, bare_group) in enumerate(BARE_GROUPS.items()):
                compute, word, size = tokens[2 + 3 * column : 5 + 3 * column]
                key = (compute, word, size, column)
                if key not in ops:
                    ops[key] = _parse_ops(compute, word, size, bare_group, line=number, column=title)
                phases.append(ops[key])
            notes = []
            if tokens[1] != "-1":
                notes.append(("depends", tokens[1]))
            if columns == 13:
                if tokens[12] not in POLICIES:
                    expected = f"expected one of {', '.join(POLICIES)}"
                    raise FormatError(f"unknown layer policy {shorten(tokens[12])}; {expected}", line=number)
                notes.append(("policy", tokens[12]))
            process_s = parse_amount(tokens[11], "process time", number) * NS
            role = Role.OPTIMIZER if tokens[0] in LINES["optimizer"] else None
            layer = known[line] = Layer(tokens[0], phases[0], phases[1], phases[2], process_s, tuple(notes), role=role)
        layers.append(layer)
    expect(len(layers) == declared, f"declares {declared} layer lines but holds {len(layers)}", line=2)
    expect(layers, "holds no layer lines; expected at least one", line=2)
    for index in header.checkpoints + header.checkpoint_initiates:
        expect(index < len(layers), f"checkpoint names layer {index}, but the file has {len(layers)}", line=1)
    return _assemble(header, layers, header_line, source.path)


def _parse_ops(compute: str, word: str, size: str, bare_group: Group, *, line: int, column: str) -> tuple[Op, ...]:
    """Return the computation of one column, and its communication if there is one."""
    computed = Op("", Recorded(parse_amount(compute, f"{column} compute time", line) * NS))
    size_bytes = parse_count(size, f"{column} size", line)
    if word == "NONE":
        return (computed,)
    collective = parse_collective(word, size_bytes, bare_group)
    if collective is None:
        expected = f"NONE, {', '.join(KINDS)}, bare or with _EP or _DP_EP"
        raise FormatError(f"unknown collective {shorten(word)}; expected {expected}", line=line)
    return (computed, Op(collective.kind, collective))


def parse_collective(word: str, size_bytes: int, bare_group: Group) -> Collective | None:
    """Return the collective of a word such as ALLGATHER_DP_EP, over *bare_group* without an ending; None if unknown."""
    kind, _, suffix = word.partition("_")
    if kind not in KINDS or (suffix and suffix not in SUFFIXES):
        return None
    return Collective(KINDS[kind], size_bytes, SUFFIXES.get(suffix, bare_group))


def _assemble(header: SimaiHeader, layers: list[Layer], header_line: str, path: str) -> Workload:
    # Lines at both ends run once per step, the micro-batches are between.
    start, end = 0, len(layers)
    while start < end and layers[start].name in LINES["prologue"]:
        start += 1
    while end > start and layers[end - 1].name in LINES["epilogue"] + LINES["optimizer"]:
        end -= 1
    warnings = [f"header key {key!r} is not known and was left out" for key in header.unknown_keys]
    declared = header.micro_batches or 1
    body = layers[start:end]
    starts = sum(layer.name == "embedding_layer" for layer in body)  # the first line of each micro-batch
    counts = [count for count in (declared, starts) if count > 1]  # as many as declared, or as many as begin
    folded = next(filter(None, (fold_micro_batches(body, count) for count in counts)), MicroBatches(body, 1, {}))
    written = folded.copies
    if written not in (1, declared):
        warnings.append(
            f"the header says ga: {declared} but {written} micro-batches are written out; {written} is used"
        )
    elif written == 1 and declared > 1:
        warnings.append(f"one micro-batch is written out and represents all {declared} of the header's ga")
    layout = header.layout
    if header.gpus is not None and layout.gpus != header.gpus:
        warnings.append(f"all_gpus {header.gpus} is not a multiple of tp x pp; dp is taken as {layout.dp}")
    blocks = fold_layers(folded.base)
    stage = Stage(
        body=blocks,
        prologue=tuple(layers[:start]),
        epilogue=tuple(layers[end:]),
        varied=tuple((which, vary_blocks(blocks, rows)) for which, rows in sorted(folded.varied.items())),
    )
    return Workload(
        stages=(stage,),
        layout=layout,
        micro_batches=declared if written == 1 else written,
        boundary_bytes=header.boundary_bytes,
        name=path.replace("\\", "/").rsplit("/", 1)[-1].rsplit(".", 1)[0],
        source="simai",
        notes=(
            ("lines", str(len(layers))),
            ("simai.header", header_line),
            ("simai.policy", header.policy),
            ("simai.written_micro_batches", str(written)),
        ),
        warnings=tuple(warnings),
    )


class MicroBatches(NamedTuple):
    """One micro-batch that represents *copies*, and the rows in which some of them differ from it."""

    base: Sequence[Layer]
    copies: int
    varied: Mapping[int, Mapping[int, Layer]]


# Repeats in a written-out list of layers are stored once with their count. This is the longest run of layers
# looked for as one repeating unit, e.g. a mixture-of-experts layer of nine rows.
LONGEST_UNIT = 64


def fold_micro_batches(body: Sequence[Layer], count: int) -> MicroBatches | None:
    """Return *body* as *count* micro-batches, or None where the names of their rows do not repeat.

    Rows may differ in their values: AICB writes other weight-gradient times for the first embedding. The
    base has at each position the row that most micro-batches have.
    """
    if count < 1 or len(body) % count:
        return None
    period = len(body) // count
    base = list(body[-period:])
    if body[:-period] == body[period:]:
        return MicroBatches(base, count, {})
    ids = _layer_numbers(body)
    varied: dict[int, dict[int, Layer]] = {}
    for position in range(period):
        column = ids[position::period]
        if column.count(column[-1]) == count:
            continue
        if any(body[row].name != base[position].name for row in range(position, len(body), period)):
            return None
        # Of equally many the last one, which is no first micro-batch with extra work.
        usual = max(reversed(column), key=Counter(column).__getitem__)
        base[position] = body[position + column.index(usual) * period]
        for micro_batch, number in enumerate(column):
            if number != usual:
                varied.setdefault(micro_batch, {})[position] = body[position + micro_batch * period]
    return MicroBatches(base, count, varied)


def fold_layers(layers: Sequence[Layer]) -> tuple[Block, ...]:
    """Return *layers* as blocks: at each position the repeating unit that covers most, else a plain run."""
    blocks: list[Block] = []
    plain_from = 0
    for start, end, times in find_patterns(_layer_numbers(layers), LONGEST_UNIT):
        if times > 1:
            if plain_from < start:
                blocks.append(Block(tuple(layers[plain_from:start])))
            blocks.append(Block(tuple(layers[start:end]), times))
            plain_from = start + (end - start) * times
    if plain_from < len(layers):
        blocks.append(Block(tuple(layers[plain_from:])))
    return tuple(blocks)


def _layer_numbers(layers: Sequence[Layer]) -> list[int]:
    """Return a number for each layer, equal where the layers are; readers share equal layers as one object."""
    objects = {id(layer): layer for layer in layers}
    by_value: dict[Layer, int] = {}
    by_object = {key: by_value.setdefault(layer, len(by_value)) for key, layer in objects.items()}
    return [by_object[id(layer)] for layer in layers]
