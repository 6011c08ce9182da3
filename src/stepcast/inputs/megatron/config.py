"""The configuration of a Megatron-LM run, inferred from its traces.

Megatron-LM numbers ranks with tensor parallelism fastest, then data, then pipeline: rank = stage x B + ...
where B = tp x dp ranks share a stage. The last stage names itself by its loss. Sizes come from tensor
shapes, tp and layers from the exact parameter count of a stage. A file name such as
``wd8_tp2_pp4_numl40_bs2_..._rank7_...`` only fills gaps and is checked against the content.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import field
from typing import NamedTuple, TypeVar

from stepcast.inputs.megatron.lines import RankEvidence, check_same_run, common_hints
from stepcast.inputs.source import FormatError
from stepcast.ir.dataclass import dataclass
from stepcast.ir.layout import Group, Layout, members

# How many ranks share experts follows from the tokens that they exchange.

UNKNOWN_EP = (
    "how many ranks share experts (ep) follows neither from the file names nor from the tokens they "
    "exchange: taken as 1, so that their exchanges keep the time of waiting; name the files with a "
    "field such as _exp8_"
)


def _returns_tokens(group: Sequence[tuple[int, ...]]) -> bool:
    """Return whether exchanges come in equal pairs: out to the experts, and back."""
    if len({len(rows) for rows in group}) > 1 or len(group[0]) % 2:
        return False
    totals = [sum(rows) for rows in zip(*group, strict=True)]
    return totals[::2] == totals[1::2]


def expert_size(ranks: Sequence[RankEvidence], tp: int, dp: int, hints: Mapping[str, int]) -> tuple[int | None, str]:
    """Return ep and how it is known; None where it cannot be inferred."""
    hint = hints.get("ep")
    if hint and tp * dp % hint:  # no stage of this run can form such groups
        hint = None
    if all(rank.exchanges is None for rank in ranks):
        return (hint or 1), ("file name" if hint else "read: no rank communicates between experts")
    # go out; nothing where no group was given completely. Rising: a multiple of a group that fits does too.
    sent = {rank.rank: rank.exchanges for rank in ranks if rank.exchanges}
    sizes = []
    for size in (size for size in range(1, dp + 1) if dp % size == 0):
        layout = Layout(tp=tp, dp=dp, pp=max(sent) // (tp * dp) + 1, ep=size)
        groups: dict[tuple[int, ...], list[tuple[int, ...]]] = {}
        for rank, rows in sent.items():
            groups.setdefault(members(rank, Group.EP, layout), []).append(rows)
        complete = [group for group in groups.values() if len(group) == size]
        if complete and all(map(_returns_tokens, complete)):
            sizes.append(size)
    # Where every rank hands in the same each time, any size would fit.
    is_even = len({rows for rank in ranks if rank.exchanges for rows in rank.exchanges}) < 2
    if hint is not None and (hint in sizes or not sizes or is_even):
        return hint, "file name"
    if sizes and (dp == 1 or not is_even):
        return sizes[0], "solved: tokens that go out to experts and come back"
    return None, "assumed"


# Which transformer has exactly this many parameters on a pipeline stage.
#
# Gradient buffers of Megatron-LM hold the parameters of one tensor-parallel rank of one stage, so their
# length is an equation in the sizes of the model. Parameters per layer and rank, with hidden size h, ffn
# size f, key/value width k and tensor parallelism t:
#
#     matrices  (2 h h + 2 h k + (g + 1) h f) / t      g = 2 for a gated MLP (SwiGLU), otherwise 1
#     biases    (h + 2 k + g f) / t + 2 h              split with their columns; the two row-split ones are not
#     norms     2 x 2 h (LayerNorm) or 2 x h (RMSNorm)
#
# The first stage adds the word embedding shard and, where learnt, position embeddings; the last one the
# output shard and a final norm.

MOST_LAYERS_ON_A_STAGE = 256


class StageCount(NamedTuple):
    """Parameters that one rank of a stage holds, as read."""

    stage: int
    parameters: int
    is_first: bool
    is_last: bool
    layers: int | None  # where its all-reduces show them


class LayerStyle(NamedTuple):
    gated: bool
    bias: bool
    rms_norm: bool


# Most usual first: GPT, then Llama as Megatron-LM builds it with and without --disable-bias-linear.
STYLES = (
    LayerStyle(gated=False, bias=True, rms_norm=False),
    LayerStyle(gated=True, bias=False, rms_norm=True),
    LayerStyle(gated=True, bias=True, rms_norm=True),
    LayerStyle(gated=False, bias=False, rms_norm=False),
    LayerStyle(gated=False, bias=True, rms_norm=True),
    LayerStyle(gated=False, bias=False, rms_norm=True),
    LayerStyle(gated=True, bias=False, rms_norm=False),
    LayerStyle(gated=True, bias=True, rms_norm=False),
)
KV_GROUPINGS = (1, 2, 4, 8, 16, 32)


class ModelSolution(NamedTuple):
    """A model that explains every stage's parameter count exactly."""

    tp: int
    style: LayerStyle
    ffn: int
    kv_width: int
    learnt_positions: bool
    layers_on: tuple[tuple[int, int], ...]  # (stage, layers)


def solve_parameters(
    counts: Sequence[StageCount], *, hidden: int, seq: int, vocab_shard: int | None, tensor_sizes: Iterable[int]
) -> list[ModelSolution]:
    """Return every usual model that fits all *counts*; with plain attention if any does, else with grouped keys."""
    needs_vocab = any(count.is_first or count.is_last for count in counts)
    if not counts or (needs_vocab and vocab_shard is None):
        return []
    sizes = [tp for tp in tensor_sizes if hidden % tp == 0]
    for grouping in KV_GROUPINGS:
        # Solutions that differ in something a stage's count can show (a middle stage shows no positions).
        distinct: dict[tuple[object, ...], ModelSolution] = {}
        if hidden % grouping:
            continue
        for tp in sizes:
            for style in STYLES:
                for positions in (seq, 0):
                    args = (counts, hidden, hidden // grouping, vocab_shard or 0, positions, tp, style)
                    for solution in _solve_style(*args):
                        distinct.setdefault(solution._replace(learnt_positions=False), solution)
        if distinct:
            return list(distinct.values())
    return []


def _solve_style(
    counts: Sequence[StageCount],
    hidden: int,
    kv_width: int,
    vocab_shard: int,
    positions: int,
    tp: int,
    style: LayerStyle,
) -> Iterator[ModelSolution]:
    """Yield solutions of one style: the first stage's count gives the ffn size, the others must agree."""
    norm = hidden if style.rms_norm else 2 * hidden

    def in_layers(count: StageCount) -> int:
        rest = count.parameters
        if count.is_first:
            rest -= (vocab_shard + positions) * hidden
        if count.is_last:
            rest -= norm + (0 if count.is_first else vocab_shard * hidden)
        return rest

    totals = [in_layers(count) for count in counts]
    if min(totals) <= 0:
        return
    known = counts[0].layers
    for layers in (known,) if known else range(1, MOST_LAYERS_ON_A_STAGE + 1):
        if totals[0] % layers:
            continue
        per_layer = totals[0] // layers
        ffn = _ffn_size(per_layer, hidden, kv_width, tp, style)
        if ffn is None or not _is_usual_ffn(ffn, hidden, tp, style, layers_known=known is not None):
            continue
        if any(total % per_layer for total in totals):
            continue
        layers_on = tuple((count.stage, total // per_layer) for count, total in zip(counts, totals, strict=True))
        if all(count.layers in (None, on) for count, (_, on) in zip(counts, layers_on, strict=True)):
            yield ModelSolution(tp, style, ffn, kv_width, positions > 0, layers_on)


def _ffn_size(per_layer: int, hidden: int, kv_width: int, tp: int, style: LayerStyle) -> int | None:
    """Return the ffn size of a layer with *per_layer* parameters per rank, if it is a whole number."""
    columns = 2 if style.gated else 1
    fixed = 2 * hidden * hidden + 2 * hidden * kv_width
    fixed += 2 * tp * (hidden if style.rms_norm else 2 * hidden)
    per_ffn = (columns + 1) * hidden
    if style.bias:
        fixed += hidden + 2 * kv_width + 2 * tp * hidden
        per_ffn += columns
    rest = tp * per_layer - fixed
    return rest // per_ffn if rest > 0 and rest % per_ffn == 0 else None


def _is_usual_ffn(ffn: int, hidden: int, tp: int, style: LayerStyle, *, layers_known: bool) -> bool:
    """Accept numbers people choose: 4 h, or a multiple of 64 (of 256 where the layers are unknown too)."""
    if ffn % tp:
        return False
    if ffn == 4 * hidden and not style.gated:
        return True
    if not layers_known and not style.gated:
        return False
    return ffn % (64 if layers_known else 256) == 0 and 2 * hidden <= ffn <= 8 * hidden


TENSOR_SIZES = (1, 2, 4, 8, 16, 32, 64)


@dataclass
class InferredConfig:
    """Facts as they are found; *basis* states how each is known."""

    facts: dict[str, object] = field(default_factory=dict)
    basis: dict[str, str] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    layout: Layout = Layout()

    def learn(self, word: str, value: object, basis: str) -> None:
        self.facts[word] = value
        self.basis[word] = basis

    def size(self, word: str) -> int | None:
        value = self.facts.get(word)
        return value if isinstance(value, int) else None


def infer(ranks: Sequence[RankEvidence]) -> InferredConfig:
    """Return the run that *ranks* belong to; FormatError where they cannot be of one run."""
    check_same_run(ranks)
    hints = common_hints(ranks)
    findings = InferredConfig()
    _learn_sizes(ranks, findings)
    pp = _learn_pipeline(ranks, hints, findings)
    blocks = _ranks_per_stage(ranks, pp)
    solutions = _solve_model(ranks, pp, blocks, findings)
    tp = _learn_tensor(ranks, blocks, solutions, hints, findings)
    block = _learn_block(ranks, blocks, tp, pp, hints, findings)
    _learn_model(ranks, [solution for solution in solutions if solution.tp == tp], pp, hints, findings)
    if (vocab_shard := findings.size("vocab_shard")) is not None:
        del findings.facts["vocab_shard"]
        findings.learn("vocab", vocab_shard * tp, "solved: shard of the vocabulary x tp")
    ep, findings.basis["ep"] = expert_size(ranks, tp, block // tp, hints)
    if ep is None:
        findings.warnings.append(UNKNOWN_EP)
    # Where the replicas alone cannot form the group, the tensor ranks take part and experts are not split.
    expert_tp = 1 if block // tp % (ep or 1) else 0
    layout = findings.layout = Layout(tp=tp, dp=block // tp, pp=pp, ep=ep or 1, expert_tp=expert_tp)
    # The content wins over the file name.
    known = {"tp": layout.tp, "pp": layout.pp, "ep": layout.ep, **findings.facts}
    for word, hint in hints.items():
        if word in known and known[word] != hint:
            findings.warnings.append(f"the file name says {word} {hint}, the content {known[word]}")
    if len(ranks) < layout.gpus:
        given = f"rank {ranks[0].rank}" if len(ranks) == 1 else f"{len(ranks)} ranks"
        findings.warnings.append(
            f"only {given} of {layout.gpus} given: a slow GPU, a slow operation and waiting for another rank "
            "cannot be distinguished"
        )
    findings.facts["basis"] = findings.basis
    return findings


T = TypeVar("T")


def _first(values: Iterable[T | None]) -> T | None:
    return next((value for value in values if value is not None), None)


def _learn_sizes(ranks: Sequence[RankEvidence], findings: InferredConfig) -> None:
    transfer = _first(rank.transfer for rank in ranks)
    tokens = _first(rank.tokens for rank in ranks)
    embedding = _first(rank.word_embedding for rank in ranks)
    hidden = _first(rank.hidden for rank in ranks)
    if hidden is not None:
        findings.learn("hidden", hidden, "read: tensor shapes")
    batch = tokens or ((transfer[1], transfer[0]) if transfer else ())
    shown = "shape of the batch" if tokens else "tensors between stages"
    for word, size in zip(("micro_batch", "seq"), batch, strict=False):
        findings.learn(word, size, f"read: {shown}")
    if transfer is not None and tokens is not None and transfer[0] != tokens[1]:
        findings.learn("sequence_parallel", tokens[1] // transfer[0], "read: sequence is split between stages")
    if embedding is not None:
        findings.facts["vocab_shard"] = embedding[0]
    dtype = _first(rank.dtype for rank in ranks)
    if dtype is not None:
        findings.learn("dtype", dtype.value, "read: tensors between stages or in the layers")
    micro_batches = max(rank.micro_batches for rank in ranks)
    if micro_batches:
        findings.learn("micro_batches", micro_batches, "read: batch_id of forward_step")


def _learn_pipeline(ranks: Sequence[RankEvidence], hints: Mapping[str, int], findings: InferredConfig) -> int:
    last = next((rank for rank in ranks if rank.is_last), None)
    if last is not None:
        findings.basis["pp"] = f"read: stage {last.stage} of rank {last.rank} is the last (loss or tied embedding)"
        return last.stage + 1
    deepest = max(rank.stage for rank in ranks)
    if hints.get("pp", 0) > deepest + 1:
        findings.basis["pp"] = "file name"
        return hints["pp"]
    findings.basis["pp"] = "assumed"
    findings.warnings.append(
        f"no rank of the last stage was given: the pipeline has more than {deepest + 1} stages, taken as {deepest + 2}"
    )
    return deepest + 2


def _ranks_per_stage(ranks: Sequence[RankEvidence], pp: int) -> range | None:
    """Return possible numbers of ranks on a stage, None where any would do; FormatError where there is none."""
    numbers = sorted(rank.rank for rank in ranks)
    stages = [rank.stage for rank in ranks]
    is_complete = numbers == list(range(len(ranks))) and len(ranks) % pp == 0
    if is_complete and all(stages.count(stage) == len(ranks) // pp for stage in range(pp)):
        return range(len(ranks) // pp, len(ranks) // pp + 1)
    # floor(rank / B) = stage
    low = max(rank.rank // (rank.stage + 1) + 1 for rank in ranks)
    high = min((rank.rank // rank.stage for rank in ranks if rank.stage), default=None)
    if high is None:
        return None
    if high < low:
        odd = max(ranks, key=lambda rank: rank.stage / (rank.rank + 1))
        raise FormatError(
            f"ranks {', '.join(map(str, numbers[:8]))} on stages {', '.join(map(str, stages[:8]))} fit no "
            "layout in which neighbouring ranks share a stage; expected ranks of one run",
            odd.path,
        )
    return range(low, high + 1)


def _multiples(blocks: range | None, tp: int) -> range:
    """Return the members of *blocks* that *tp* divides."""
    return range(0) if blocks is None else range(-(-blocks.start // tp) * tp, blocks.stop, tp)


def _solve_model(
    ranks: Sequence[RankEvidence], pp: int, blocks: range | None, findings: InferredConfig
) -> list[ModelSolution]:
    counts = {
        rank.stage: StageCount(
            rank.stage,
            rank.gradients,
            is_first=rank.stage == 0,
            is_last=rank.stage == pp - 1,
            layers=rank.forward_reduces // 2 if rank.forward_reduces else None,
        )
        for rank in ranks
        if rank.gradients is not None
    }
    hidden, seq = findings.size("hidden"), findings.size("seq")
    if hidden is None or seq is None:
        return []
    return solve_parameters(
        [counts[stage] for stage in sorted(counts)],
        hidden=hidden,
        seq=seq,
        vocab_shard=findings.size("vocab_shard"),
        tensor_sizes=[tp for tp in TENSOR_SIZES if blocks is None or _multiples(blocks, tp)],
    )


def _learn_tensor(
    ranks: Sequence[RankEvidence],
    blocks: range | None,
    solutions: Sequence[ModelSolution],
    hints: Mapping[str, int],
    findings: InferredConfig,
) -> int:
    reduces = [rank.forward_reduces for rank in ranks if rank.forward_reduces is not None]
    splits = any(reduces)
    fitting = list(dict.fromkeys(solution.tp for solution in solutions))
    if reduces:
        fitting = [tp for tp in fitting if (tp > 1) == splits]
    if len(fitting) == 1 or (fitting and hints.get("tp") in fitting):
        findings.basis["tp"] = "solved: parameters of the stage" if len(fitting) == 1 else "file name"
        return fitting[0] if len(fitting) == 1 else hints["tp"]
    if fitting:
        findings.basis["tp"] = "assumed"
        findings.warnings.append(f"tensor parallelism may be {_either(fitting)}; taken as {fitting[0]}")
        return fitting[0]
    if reduces and not splits:
        findings.basis["tp"] = "read: no layer reduces its output over tp"
        return 1
    if "tp" in hints:
        findings.basis["tp"] = "file name"
        return hints["tp"]
    possible = [tp for tp in TENSOR_SIZES if tp > splits and _multiples(blocks, tp)]
    tp = possible[-1] if splits and possible else (2 if splits else 1)
    findings.basis["tp"] = "assumed"
    findings.warnings.append(f"tensor parallelism cannot be inferred from these ranks; taken as {tp}")
    return tp


def _learn_block(
    ranks: Sequence[RankEvidence],
    blocks: range | None,
    tp: int,
    pp: int,
    hints: Mapping[str, int],
    findings: InferredConfig,
) -> int:
    """Return the ranks on one stage, a multiple of *tp*."""
    fitting = _multiples(blocks, tp)
    if len(fitting) == 1:
        findings.learn("world", fitting[0] * pp, "read: rank numbers and stages")
        findings.basis["dp"] = "read: rank numbers and stages"
        return fitting[0]
    hint = hints.get("world", 0)
    if hint and hint % (pp * tp) == 0 and (not fitting or hint // pp in fitting):
        findings.learn("world", hint, "file name")
        findings.basis["dp"] = "file name"
        return hint // pp
    highest = max(rank.rank for rank in ranks)
    smallest = fitting[0] if fitting else -(-(highest + 1) // tp) * tp
    # Of several, people choose a power of two.
    powers = [tp << exponent for exponent in range(24) if tp << exponent in fitting]
    block = powers[0] if powers else smallest
    findings.learn("world", block * pp, "assumed")
    findings.basis["dp"] = "assumed"
    options = _either(block // tp for block in fitting[:8]) if fitting else f"{smallest // tp} or more"
    findings.warnings.append(f"data parallelism may be {options}; taken as {block // tp}")
    return block


def _learn_model(
    ranks: Sequence[RankEvidence],
    solutions: Sequence[ModelSolution],
    pp: int,
    hints: Mapping[str, int],
    findings: InferredConfig,
) -> None:
    gradients = {rank.stage: rank.gradients for rank in ranks if rank.gradients is not None}
    chosen = _choose_solution(solutions, pp, hints, findings)
    if chosen is not None:
        findings.learn("parameters", gradients, "read: elements of the gradient all-reduce, per rank of a stage")
        layers_on = dict(chosen.layers_on)
        has_all = len(layers_on) == pp
        layers = sum(layers_on.values()) if has_all else next(iter(layers_on.values())) * pp
        extent = "of every stage" if has_all else "of a stage, the same on each"
        certainty = "assumed" if findings.basis["pp"] == "assumed" else "solved"
        findings.learn("layers", layers, f"{certainty}: parameters {extent}")
        findings.learn("layers_on", layers_on, "solved: parameters of the stage")
        findings.learn("ffn", chosen.ffn, "solved: parameters of a stage")
        findings.learn("gated_mlp", chosen.style.gated, "solved: parameters of a stage")
        if 0 in layers_on:
            findings.learn("learnt_positions", chosen.learnt_positions, "solved: parameters of the first stage")
        return
    if gradients:
        _learn_unexplained(gradients, findings)
    reduces = next((rank.forward_reduces for rank in ranks if rank.forward_reduces), None)
    if reduces:
        findings.learn("layers", reduces // 2 * pp, "read: two tp all-reduces per layer of a stage's forward")
    elif "layers" in hints:
        findings.learn("layers", hints["layers"], "file name")


def _choose_solution(
    solutions: Sequence[ModelSolution], pp: int, hints: Mapping[str, int], findings: InferredConfig
) -> ModelSolution | None:
    by_layers: dict[int, ModelSolution] = {}
    for solution in solutions:
        by_layers.setdefault(sum(on for _, on in solution.layers_on) * pp // len(solution.layers_on), solution)
    if hints.get("layers") in by_layers:
        return by_layers[hints["layers"]]
    if len(by_layers) > 1:
        layers = list(by_layers)
        findings.warnings.append(f"the parameters fit {_either(layers)} layers; taken as {layers[0]}")
    return solutions[0] if solutions else None


def _learn_unexplained(gradients: Mapping[int, int], findings: InferredConfig) -> None:
    """Note gradients that are no dense stage: complete expert matrices only, or something unknown."""
    hidden = findings.size("hidden")
    if hidden and all(count % (2 * hidden * hidden) == 0 for count in gradients.values()):
        findings.learn("expert_parameters", dict(gradients), "read: elements of the gradient all-reduce")
        findings.warnings.append(
            "the traced gradients are complete matrices without biases, norms or embeddings: expert weights "
            "alone; the parameters of a stage cannot be inferred"
        )
        return
    findings.learn("parameters", dict(gradients), "read: elements of the gradient all-reduce, per rank of a stage")
    findings.warnings.append("the parameters of a stage fit no usual dense transformer: ffn size is not known")


def _either(values: Iterable[int]) -> str:
    return " or ".join(str(value) for value in values)
