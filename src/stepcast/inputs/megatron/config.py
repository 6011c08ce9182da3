"""What a Megatron-LM run was, told from its traces.

Megatron-LM numbers ranks with tensor parallelism fastest, then data, then pipeline: rank = stage x B + ...
where B = tp x dp ranks share a stage. The last stage names itself by its loss. Sizes come from tensor
shapes, tp and layers from the exact parameter count of a stage. A file name such as
``wd8_tp2_pp4_numl40_bs2_..._rank7_...`` only fills gaps and is checked against the content.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from stepcast.inputs.errors import FormatError
from stepcast.inputs.megatron.evidence import RankEvidence, check_same_run, common_hints
from stepcast.inputs.megatron.expert_groups import UNKNOWN_EP, expert_size
from stepcast.inputs.megatron.shape import Solution, StageCount, solutions
from stepcast.ir.layout import Layout

TENSOR_SIZES = (1, 2, 4, 8, 16, 32, 64)


@dataclass
class Findings:
    """Facts as they are found; *basis* says how each is known."""

    facts: dict[str, Any] = field(default_factory=dict)
    basis: dict[str, str] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)

    def learn(self, word: str, value: Any, basis: str) -> None:
        self.facts[word] = value
        self.basis[word] = basis


@dataclass(frozen=True, slots=True)
class Config:
    layout: Layout
    stage_of_rank: Mapping[int, int]
    facts: Mapping[str, Any]
    warnings: tuple[str, ...]


def infer(ranks: Sequence[RankEvidence]) -> Config:
    """The run that *ranks* belong to; FormatError where they cannot be of one run."""
    check_same_run(ranks)
    hints = common_hints(ranks)
    findings = Findings()
    _learn_sizes(ranks, findings)
    pp = _learn_pipeline(ranks, hints, findings)
    blocks = _ranks_per_stage(ranks, pp)
    found = _model_solutions(ranks, pp, blocks, findings)
    tp = _learn_tensor(ranks, blocks, found, hints, findings)
    block = _learn_block(ranks, blocks, tp, pp, hints, findings)
    _learn_model(ranks, [one for one in found if one.tp == tp], pp, hints, findings)
    if "vocab_shard" in findings.facts:
        findings.learn(
            "vocab", findings.facts.pop("vocab_shard") * tp, "solved: shard of the vocabulary x tp"
        )
    ep, findings.basis["ep"] = expert_size(ranks, tp, block // tp, hints)
    if ep is None:
        findings.warnings.append(UNKNOWN_EP)
    # Where the replicas alone cannot form the group, the tensor ranks take part and experts are whole.
    expert_tp = 1 if block // tp % (ep or 1) else 0
    layout = Layout(tp=tp, dp=block // tp, pp=pp, ep=ep or 1, expert_tp=expert_tp)
    _check_hints(layout, hints, findings)
    _warn_of_missing_ranks(ranks, layout, findings)
    findings.facts["basis"] = findings.basis
    stages = {rank.rank: rank.stage for rank in ranks}
    return Config(layout, stages, findings.facts, tuple(findings.warnings))


T = TypeVar("T")


def _first(values: Iterable[T | None]) -> T | None:
    return next((value for value in values if value is not None), None)


def _learn_sizes(ranks: Sequence[RankEvidence], findings: Findings) -> None:
    transfer = _first(rank.transfer for rank in ranks)
    tokens = _first(rank.tokens for rank in ranks)
    embedding = _first(rank.word_embedding for rank in ranks)
    hidden = _first(rank.hidden for rank in ranks)
    if hidden is not None:
        findings.learn("hidden", hidden, "read: tensor shapes")
    if tokens is not None:
        findings.learn("micro_batch", tokens[0], "read: shape of the batch")
        findings.learn("seq", tokens[1], "read: shape of the batch")
    elif transfer is not None:
        findings.learn("micro_batch", transfer[1], "read: tensors between stages")
        findings.learn("seq", transfer[0], "read: tensors between stages")
    if transfer is not None and tokens is not None and transfer[0] != tokens[1]:
        findings.learn(
            "sequence_parallel", tokens[1] // transfer[0], "read: sequence is split between stages"
        )
    if embedding is not None:
        findings.facts["vocab_shard"] = embedding[0]
    dtype = _first(rank.dtype for rank in ranks)
    if dtype is not None:
        findings.learn("dtype", dtype.value, "read: tensors between stages or in the layers")
    micro_batches = max(rank.micro_batches for rank in ranks)
    if micro_batches:
        findings.learn("micro_batches", micro_batches, "read: batch_id of forward_step")


def _learn_pipeline(ranks: Sequence[RankEvidence], hints: Mapping[str, int], findings: Findings) -> int:
    last = next((rank for rank in ranks if rank.is_last), None)
    if last is not None:
        findings.basis["pp"] = (
            f"read: stage {last.stage} of rank {last.rank} is the last (loss or tied embedding)"
        )
        return last.stage + 1
    deepest = max(rank.stage for rank in ranks)
    if hints.get("pp", 0) > deepest + 1:
        findings.basis["pp"] = "file name"
        return hints["pp"]
    findings.basis["pp"] = "assumed"
    findings.warnings.append(
        f"no rank of the last stage was given: the pipeline has more than {deepest + 1} stages, "
        f"taken as {deepest + 2}"
    )
    return deepest + 2


def _ranks_per_stage(ranks: Sequence[RankEvidence], pp: int) -> range | None:
    """Possible numbers of ranks on a stage, None where any would do; FormatError where there is none."""
    numbers = sorted(rank.rank for rank in ranks)
    stages = [rank.stage for rank in ranks]
    whole = numbers == list(range(len(ranks))) and len(ranks) % pp == 0
    if whole and all(stages.count(stage) == len(ranks) // pp for stage in range(pp)):
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
    """The members of *blocks* that *tp* divides."""
    return range(0) if blocks is None else range(-(-blocks.start // tp) * tp, blocks.stop, tp)


def _model_solutions(
    ranks: Sequence[RankEvidence], pp: int, blocks: range | None, findings: Findings
) -> list[Solution]:
    facts = findings.facts
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
    if "hidden" not in facts or "seq" not in facts:
        return []
    sizes = [tp for tp in TENSOR_SIZES if blocks is None or _multiples(blocks, tp)]
    return solutions(
        [counts[stage] for stage in sorted(counts)],
        hidden=facts["hidden"],
        seq=facts["seq"],
        vocab_shard=facts.get("vocab_shard"),
        tensor_sizes=sizes,
    )


def _learn_tensor(
    ranks: Sequence[RankEvidence],
    blocks: range | None,
    found: Sequence[Solution],
    hints: Mapping[str, int],
    findings: Findings,
) -> int:
    reduces = [rank.forward_reduces for rank in ranks if rank.forward_reduces is not None]
    splits = any(reduces)
    fitting = list(dict.fromkeys(one.tp for one in found))
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
    findings.warnings.append(f"tensor parallelism cannot be told from these ranks; taken as {tp}")
    return tp


def _learn_block(
    ranks: Sequence[RankEvidence],
    blocks: range | None,
    tp: int,
    pp: int,
    hints: Mapping[str, int],
    findings: Findings,
) -> int:
    """Ranks on one stage, a multiple of *tp*."""
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
    found: Sequence[Solution],
    pp: int,
    hints: Mapping[str, int],
    findings: Findings,
) -> None:
    gradients = {rank.stage: rank.gradients for rank in ranks if rank.gradients is not None}
    chosen = _choose(found, pp, hints, findings)
    if chosen is not None:
        findings.learn(
            "parameters", gradients, "read: elements of the gradient all-reduce, per rank of a stage"
        )
        layers_on = dict(chosen.layers_on)
        everywhere = len(layers_on) == pp
        layers = sum(layers_on.values()) if everywhere else next(iter(layers_on.values())) * pp
        how = "of every stage" if everywhere else "of a stage, the same on each"
        sure = "assumed" if findings.basis["pp"] == "assumed" else "solved"
        findings.learn("layers", layers, f"{sure}: parameters {how}")
        findings.learn("layers_on", layers_on, "solved: parameters of the stage")
        findings.learn("ffn", chosen.ffn, "solved: parameters of a stage")
        findings.learn("gated_mlp", chosen.style.gated, "solved: parameters of a stage")
        if 0 in layers_on:
            findings.learn(
                "learnt_positions", chosen.learnt_positions, "solved: parameters of the first stage"
            )
        return
    if gradients:
        _learn_unexplained(gradients, findings)
    reduces = next((rank.forward_reduces for rank in ranks if rank.forward_reduces), None)
    if reduces:
        findings.learn("layers", reduces // 2 * pp, "read: two tp all-reduces per layer of a stage's forward")
    elif "layers" in hints:
        findings.learn("layers", hints["layers"], "file name")


def _choose(
    found: Sequence[Solution], pp: int, hints: Mapping[str, int], findings: Findings
) -> Solution | None:
    if not found:
        return None
    by_layers: dict[int, Solution] = {}
    for one in found:
        by_layers.setdefault(sum(on for _, on in one.layers_on) * pp // len(one.layers_on), one)
    if hints.get("layers") in by_layers:
        return by_layers[hints["layers"]]
    if len(by_layers) > 1:
        layers = list(by_layers)
        findings.warnings.append(f"the parameters fit {_either(layers)} layers; taken as {layers[0]}")
    return found[0]


def _learn_unexplained(gradients: Mapping[int, int], findings: Findings) -> None:
    """Gradients that are no dense stage: whole expert matrices only, or something unknown."""
    hidden = findings.facts.get("hidden")
    if hidden and all(count % (2 * hidden * hidden) == 0 for count in gradients.values()):
        findings.learn("expert_parameters", dict(gradients), "read: elements of the gradient all-reduce")
        findings.warnings.append(
            "the traced gradients are whole matrices without biases, norms or embeddings: expert weights "
            "alone; the parameters of a stage cannot be told"
        )
        return
    findings.learn(
        "parameters", dict(gradients), "read: elements of the gradient all-reduce, per rank of a stage"
    )
    findings.warnings.append(
        "the parameters of a stage fit no usual dense transformer: ffn size is not known"
    )


def _either(values: Iterable[int]) -> str:
    return " or ".join(str(value) for value in values)


def _check_hints(layout: Layout, hints: Mapping[str, int], findings: Findings) -> None:
    """The content wins over the file name; a difference is told."""
    known = {"tp": layout.tp, "pp": layout.pp, "ep": layout.ep, **findings.facts}
    for word, hint in hints.items():
        if word in known and known[word] != hint:
            findings.warnings.append(f"the file name says {word} {hint}, the content {known[word]}")


def _warn_of_missing_ranks(ranks: Sequence[RankEvidence], layout: Layout, findings: Findings) -> None:
    if len(ranks) < layout.gpus:
        which = f"rank {ranks[0].rank}" if len(ranks) == 1 else f"{len(ranks)} ranks"
        findings.warnings.append(
            f"only {which} of {layout.gpus} given: a slow GPU, a slow operation and waiting for another rank "
            "cannot be told apart"
        )
