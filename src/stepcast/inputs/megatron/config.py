"""The configuration of a Megatron-LM run, inferred from its traces.

Megatron-LM numbers ranks with tensor parallelism fastest, then data, then pipeline: rank = stage x B + ...
where B = tp x dp ranks share a stage. The last stage names itself by its loss. Sizes come from tensor
shapes, tp and layers from the exact parameter count of a stage. A file name such as
``wd8_tp2_pp4_numl40_bs2_..._rank7_...`` only fills gaps and is checked against the content.
"""

import re
from collections.abc import Iterator, Sequence
from itertools import product
from typing import NamedTuple

from stepcast.inputs.source import FormatError, read_words
from stepcast.ir.layout import Group, Layout, members
from stepcast.ir.types import DType, dataclass, group_by_key

FIELD = re.compile(r"(?:^|(?<=[_\-.]))([A-Za-z]{1,8})([0-9]{1,7})(?=[_\-.]|$)", re.ASCII)
NAMED_SIZES = read_words("traces")["megatron_sizes"]


def file_name_hints(path: str) -> dict[str, int]:
    """Return sizes that the file's name gives, or else the name of its folder."""
    hints: dict[str, int] = {}
    for name in reversed(path.replace("\\", "/").split("/")[-2:]):
        sizes: dict[str, int] = {}
        for word, text in FIELD.findall(name):
            if word.lower() in NAMED_SIZES and int(text):
                sizes.setdefault(NAMED_SIZES[word.lower()], int(text))
        if len(sizes.keys() & {"world", "tp", "pp"}) > 1:  # others are not of a run: l8.txt may be anything
            hints = {**sizes, **hints}
    dp = hints.pop("dp", 0)
    if dp and "tp" in hints and "pp" in hints:
        hints.setdefault("world", hints["tp"] * hints["pp"] * dp)
    return hints


@dataclass(frozen=True, slots=True)
class RankEvidence:
    """The sizes of the run that one rank's operations show."""

    rank: int
    stage: int
    path: str
    transfer: tuple[int, ...] | None  # sequence, micro-batch, hidden
    tokens: tuple[int, ...] | None  # micro-batch, sequence
    word_embedding: tuple[int, ...] | None  # this rank's rows of the vocabulary, hidden
    hidden: int | None
    dtype: DType | None
    gradients: int | None
    forward_reduces: int | None  # activations reduced over tp in one forward pass; None: not traced
    micro_batches: int
    has_loss: bool
    # Rows that each all-to-all between experts of a forward pass is handed; None: experts do not communicate.
    exchanges: tuple[int, ...] | None = None

    @property
    def is_last(self) -> bool:
        return self.has_loss or (self.stage > 0 and self.word_embedding is not None)

    @property
    def stage_layers(self) -> int | None:
        """Layers of its stage, where its all-reduces show them."""
        return self.forward_reduces // 2 if self.forward_reduces else None


def _contradictions(ranks: Sequence[RankEvidence]) -> Iterator[tuple[str, str]]:
    """Yield where ranks differ in the tensors between stages, the batch or a stage's parameters, and in which file."""
    for name, title in (("transfer", "tensors between stages"), ("tokens", "batches"), ("hidden", "hidden sizes")):
        values = [(rank, value) for rank in ranks if (value := getattr(rank, name)) is not None]
        for rank, value in values[1:]:
            first, expected = values[0]
            if value != expected:
                yield f"rank {rank.rank} has {title} of {value}, but rank {first.rank} of {expected}", rank.path
    first_on: dict[int, RankEvidence] = {}
    for rank in ranks:
        first = first_on.setdefault(rank.stage, rank)
        if None not in (rank.gradients, first.gradients) and rank.gradients != first.gradients:
            other = f"rank {first.rank} of the same stage {first.gradients}"
            yield f"rank {rank.rank} has {rank.gradients} gradients, but {other}", rank.path
    last = min((rank for rank in ranks if rank.is_last), key=lambda rank: rank.stage, default=None)
    for rank in ranks:
        if last is not None and rank.stage > last.stage:
            other = f"stage {last.stage} of rank {last.rank} is the last one"
            yield f"rank {rank.rank} is on stage {rank.stage}, but {other}", rank.path


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


class LayerStyle(NamedTuple):
    gated: bool
    bias: bool
    rms_norm: bool


# Most usual first: GPT, then Llama as Megatron-LM builds it with and without --disable-bias-linear.
STYLE_WORDS = ("bias", "gated rms", "gated bias rms", "", "bias rms", "rms", "gated", "gated bias")
STYLES = tuple(LayerStyle("gated" in words, "bias" in words, "rms" in words) for words in STYLE_WORDS)
KV_GROUPINGS = (1, 2, 4, 8, 16, 32)


class ModelSolution(NamedTuple):
    """A model that explains every stage's parameter count exactly."""

    tp: int
    style: LayerStyle
    ffn: int
    learnt_positions: bool
    layers_on: tuple[tuple[int, int], ...]  # (stage, layers)


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
    if not style.gated and (ffn == 4 * hidden or not layers_known):
        return ffn == 4 * hidden
    return ffn % (64 if layers_known else 256) == 0 and 2 * hidden <= ffn <= 8 * hidden


TENSOR_SIZES = (1, 2, 4, 8, 16, 32, 64)


def _multiples(blocks: range | None, tp: int) -> range:
    """Return the members of *blocks* that *tp* divides."""
    return range(0) if blocks is None else range(-(-blocks.start // tp) * tp, blocks.stop, tp)


class InferredConfig:
    """Facts of one run as they are found; *basis* states how each is known."""

    def __init__(self, ranks: Sequence[RankEvidence]) -> None:
        first, *others = (file_name_hints(rank.path) for rank in ranks)
        self.ranks = ranks
        # Sizes that all file names agree on; none where a file has no such name.
        self.hints = {word: size for word, size in first.items() if all(hint.get(word) == size for hint in others)}
        self.facts: dict[str, object] = {}
        self.basis: dict[str, str] = {}
        self.warnings: list[str] = []
        self.vocab_shard: int | None = None
        self.pp, self.layout = 1, Layout()
        self.hidden: int | None = None
        self.seq: int | None = None

    def learn(self, word: str, value: object, basis: str) -> None:
        self.facts[word] = value
        self.basis[word] = basis

    def learn_sizes(self) -> None:
        transfer, tokens, embedding, hidden, dtype = (
            next((value for rank in self.ranks if (value := getattr(rank, name)) is not None), None)
            for name in ("transfer", "tokens", "word_embedding", "hidden", "dtype")
        )
        if hidden is not None:
            self.learn("hidden", hidden, "read: tensor shapes")
        batch = tokens or ((transfer[1], transfer[0]) if transfer else ())
        self.hidden, self.seq = hidden, batch[1] if batch else None
        basis = "shape of the batch" if tokens else "tensors between stages"
        for word, size in zip(("micro_batch", "seq"), batch, strict=False):
            self.learn(word, size, f"read: {basis}")
        if transfer is not None and tokens is not None and transfer[0] != tokens[1]:
            self.learn("sequence_parallel", tokens[1] // transfer[0], "read: sequence is split between stages")
        self.vocab_shard = None if embedding is None else embedding[0]
        if dtype is not None:
            self.learn("dtype", dtype.value, "read: tensors between stages or in the layers")
        if micro_batches := max(rank.micro_batches for rank in self.ranks):
            self.learn("micro_batches", micro_batches, "read: batch_id of forward_step")

    def learn_pipeline(self) -> None:
        last = next((rank for rank in self.ranks if rank.is_last), None)
        deepest = max(rank.stage for rank in self.ranks)
        if last is not None:
            self.pp = last.stage + 1
            self.basis["pp"] = f"read: stage {last.stage} of rank {last.rank} is the last (loss or tied embedding)"
        elif self.hints.get("pp", 0) > deepest + 1:
            self.pp, self.basis["pp"] = self.hints["pp"], "file name"
        else:
            self.pp, self.basis["pp"] = deepest + 2, "assumed"
            self.warnings.append(
                f"no rank of the last stage was given: the pipeline has more than {deepest + 1} stages, "
                f"taken as {deepest + 2}"
            )

    def ranks_per_stage(self) -> range | None:
        """Return possible numbers of ranks on a stage, None where any would do; FormatError where there is none."""
        numbers, stages = sorted(rank.rank for rank in self.ranks), [rank.stage for rank in self.ranks]
        share, rest = divmod(len(self.ranks), self.pp)
        is_complete = numbers == list(range(len(self.ranks))) and not rest
        if is_complete and all(stages.count(stage) == share for stage in range(self.pp)):
            return range(share, share + 1)
        # floor(rank / B) = stage
        low = max(rank.rank // (rank.stage + 1) + 1 for rank in self.ranks)
        high = min((rank.rank // rank.stage for rank in self.ranks if rank.stage), default=None)
        if high is None:
            return None
        if high < low:
            odd = max(self.ranks, key=lambda rank: rank.stage / (rank.rank + 1))
            raise FormatError(
                f"ranks {', '.join(map(str, numbers[:8]))} on stages {', '.join(map(str, stages[:8]))} fit no "
                "layout in which neighbouring ranks share a stage; expected ranks of one run",
                odd.path,
            )
        return range(low, high + 1)

    def solve_parameters(self, blocks: range | None) -> list[ModelSolution]:
        """Return every usual model that fits all stages; with plain attention if any does, else with grouped keys."""
        by_stage = {rank.stage: rank for rank in self.ranks if rank.gradients is not None}
        stages = [by_stage[stage] for stage in sorted(by_stage)]
        hidden, seq = self.hidden, self.seq
        needs_vocab = any(stage in (0, self.pp - 1) for stage in by_stage)
        if hidden is None or seq is None or not stages or (needs_vocab and self.vocab_shard is None):
            return []
        sizes = [tp for tp in TENSOR_SIZES if (blocks is None or _multiples(blocks, tp)) and hidden % tp == 0]
        for grouping in (grouping for grouping in KV_GROUPINGS if hidden % grouping == 0):
            # Solutions that differ in something a stage's count can show (a middle stage shows no positions).
            distinct: dict[tuple[object, ...], ModelSolution] = {}
            for tp, style, positions in product(sizes, STYLES, (seq, 0)):
                for solution in self._solve_style(stages, hidden, hidden // grouping, positions, tp, style):
                    distinct.setdefault(solution._replace(learnt_positions=False), solution)
            if distinct:
                return list(distinct.values())
        return []

    def _solve_style(
        self, stages: Sequence[RankEvidence], hidden: int, kv_width: int, positions: int, tp: int, style: LayerStyle
    ) -> Iterator[ModelSolution]:
        """Yield solutions of one style: the first stage's count gives the ffn size, the others must agree."""
        norm, vocabulary = hidden if style.rms_norm else 2 * hidden, (self.vocab_shard or 0) * hidden
        totals = []
        for rank in stages:
            ends = vocabulary + positions * hidden if rank.stage == 0 else 0
            if rank.stage == self.pp - 1:
                ends += norm + (0 if rank.stage == 0 else vocabulary)
            totals.append((rank.gradients or 0) - ends)
        if min(totals) <= 0:
            return
        known = stages[0].stage_layers
        for layers in (known,) if known else range(1, MOST_LAYERS_ON_A_STAGE + 1):
            if totals[0] % layers:
                continue
            per_layer = totals[0] // layers
            ffn = _ffn_size(per_layer, hidden, kv_width, tp, style)
            is_usual = ffn is not None and _is_usual_ffn(ffn, hidden, tp, style, layers_known=known is not None)
            if ffn is None or not is_usual or any(total % per_layer for total in totals):
                continue
            layers_on = tuple((rank.stage, total // per_layer) for rank, total in zip(stages, totals, strict=True))
            if all(rank.stage_layers in (None, on) for rank, (_, on) in zip(stages, layers_on, strict=True)):
                yield ModelSolution(tp, style, ffn, positions > 0, layers_on)

    def learn_tensor(self, blocks: range | None, solutions: Sequence[ModelSolution]) -> int:
        reduces = [rank.forward_reduces for rank in self.ranks if rank.forward_reduces is not None]
        splits, hint = any(reduces), self.hints.get("tp")
        solved = dict.fromkeys(solution.tp for solution in solutions)
        fitting = [tp for tp in solved if not reduces or (tp > 1) == splits]
        if len(fitting) == 1:
            tp, self.basis["tp"] = fitting[0], "solved: parameters of the stage"
        elif fitting and hint not in fitting:
            tp, self.basis["tp"] = fitting[0], "assumed"
            self.warnings.append(f"tensor parallelism may be {' or '.join(map(str, fitting))}; taken as {tp}")
        elif reduces and not splits and not fitting:
            tp, self.basis["tp"] = 1, "read: no layer reduces its output over tp"
        elif hint is not None:
            tp, self.basis["tp"] = hint, "file name"
        else:
            possible = [tp for tp in TENSOR_SIZES if tp > splits and _multiples(blocks, tp)]
            tp, self.basis["tp"] = possible[-1] if splits and possible else 1 + splits, "assumed"
            self.warnings.append(f"tensor parallelism cannot be inferred from these ranks; taken as {tp}")
        return tp

    def learn_block(self, blocks: range | None, tp: int) -> int:
        """Return the ranks on one stage, a multiple of *tp*."""
        fitting, hint = _multiples(blocks, tp), self.hints.get("world", 0)
        if len(fitting) == 1:
            block, basis = fitting[0], "read: rank numbers and stages"
        elif hint and hint % (self.pp * tp) == 0 and (not fitting or hint // self.pp in fitting):
            block, basis = hint // self.pp, "file name"
        else:
            smallest = fitting[0] if fitting else -(-(max(rank.rank for rank in self.ranks) + 1) // tp) * tp
            # Of several, people choose a power of two.
            powers = (tp << exponent for exponent in range(24) if tp << exponent in fitting)
            block, basis = next(powers, smallest), "assumed"
            alternatives = " or ".join(str(size // tp) for size in fitting[:8]) or f"{smallest // tp} or more"
            self.warnings.append(f"data parallelism may be {alternatives}; taken as {block // tp}")
        self.learn("world", block * self.pp, basis)
        self.basis["dp"] = basis
        return block

    def learn_model(self, solutions: Sequence[ModelSolution]) -> None:
        gradients = {rank.stage: rank.gradients for rank in self.ranks if rank.gradients is not None}
        by_layers: dict[int, ModelSolution] = {}
        for solution in solutions:
            by_layers.setdefault(sum(on for _, on in solution.layers_on) * self.pp // len(solution.layers_on), solution)
        hint = self.hints.get("layers")
        if len(by_layers) > 1 and hint not in by_layers:
            alternatives = " or ".join(map(str, by_layers))
            self.warnings.append(f"the parameters fit {alternatives} layers; taken as {next(iter(by_layers))}")
        if solutions:
            chosen = by_layers.get(hint or 0, solutions[0])
            self.learn("parameters", gradients, "read: elements of the gradient all-reduce, per rank of a stage")
            layers_on = dict(chosen.layers_on)
            has_all = len(layers_on) == self.pp
            layers = sum(layers_on.values()) if has_all else next(iter(layers_on.values())) * self.pp
            extent = "of every stage" if has_all else "of a stage, the same on each"
            certainty = "assumed" if self.basis["pp"] == "assumed" else "solved"
            self.learn("layers", layers, f"{certainty}: parameters {extent}")
            self.learn("layers_on", layers_on, "solved: parameters of the stage")
            self.learn("ffn", chosen.ffn, "solved: parameters of a stage")
            self.learn("gated_mlp", chosen.style.gated, "solved: parameters of a stage")
            if 0 in layers_on:
                self.learn("learnt_positions", chosen.learnt_positions, "solved: parameters of the first stage")
            return
        matrix = 2 * (self.hidden or 0) ** 2
        if gradients and matrix and all(count % matrix == 0 for count in gradients.values()):
            self.learn("expert_parameters", gradients, "read: elements of the gradient all-reduce")
            self.warnings.append(
                "the traced gradients are complete matrices without biases, norms or embeddings: expert weights "
                "alone; the parameters of a stage cannot be inferred"
            )
        elif gradients:
            self.learn("parameters", gradients, "read: elements of the gradient all-reduce, per rank of a stage")
            self.warnings.append("the parameters of a stage fit no usual dense transformer: ffn size is not known")
        reduces = next((rank.forward_reduces for rank in self.ranks if rank.forward_reduces), None)
        if reduces:
            self.learn("layers", reduces // 2 * self.pp, "read: two tp all-reduces per layer of a stage's forward")
        elif hint is not None:
            self.learn("layers", hint, "file name")

    def learn_experts(self, tp: int, dp: int) -> int:
        """Return how many ranks share experts, by the tokens that they exchange; 1 where it cannot be inferred."""
        hint = self.hints.get("ep")
        hint = None if hint and tp * dp % hint else hint  # no stage of this run could form such groups
        if all(rank.exchanges is None for rank in self.ranks):
            self.basis["ep"] = "file name" if hint else "read: no rank communicates between experts"
            return hint or 1
        # Nothing where no group was given completely. Rising: a multiple of a group that fits does too.
        sent = {rank.rank: rank.exchanges for rank in self.ranks if rank.exchanges}
        sizes = []
        for size in (size for size in range(1, dp + 1) if dp % size == 0):
            layout = Layout(tp=tp, dp=dp, pp=max(sent) // (tp * dp) + 1, ep=size)
            groups = group_by_key((members(rank, Group.EP, layout), rows) for rank, rows in sent.items())
            complete = [group for group in groups.values() if len(group) == size]
            totals = [[sum(rows) for rows in zip(*group, strict=False)] for group in complete]
            # Exchanges come in equal pairs: out to the experts, and back.
            is_returned = all(total[::2] == total[1::2] for total in totals)
            if complete and is_returned and all(len(set(map(len, group))) == 1 for group in complete):
                sizes.append(size)
        # Where every rank hands in the same each time, any size would fit.
        is_even = len({rows for exchanges in sent.values() for rows in exchanges}) < 2
        ep, self.basis["ep"] = 1, "assumed"
        if hint is not None and (hint in sizes or not sizes or is_even):
            ep, self.basis["ep"] = hint, "file name"
        elif sizes and (dp == 1 or not is_even):
            ep, self.basis["ep"] = sizes[0], "solved: tokens that go out to experts and come back"
        else:
            self.warnings.append(
                "how many ranks share experts (ep) follows neither from the file names nor from the tokens they "
                "exchange: taken as 1, so that their exchanges keep the time of waiting; name the files with a "
                "field such as _exp8_"
            )
        return ep


def infer(ranks: Sequence[RankEvidence]) -> InferredConfig:
    """Return the run that *ranks* belong to; FormatError where they cannot be of one run."""
    for contradiction, path in _contradictions(ranks):
        raise FormatError(f"{contradiction}; expected ranks of one run", path)
    config = InferredConfig(ranks)
    config.learn_sizes()
    config.learn_pipeline()
    blocks = config.ranks_per_stage()
    solutions = config.solve_parameters(blocks)
    tp = config.learn_tensor(blocks, solutions)
    block = config.learn_block(blocks, tp)
    config.learn_model([solution for solution in solutions if solution.tp == tp])
    if config.vocab_shard is not None:
        config.learn("vocab", config.vocab_shard * tp, "solved: shard of the vocabulary x tp")
    ep = config.learn_experts(tp, block // tp)
    # Where the replicas alone cannot form the group, the tensor ranks take part and experts are not split.
    expert_tp = 1 if block // tp % ep else 0
    layout = config.layout = Layout(tp=tp, dp=block // tp, pp=config.pp, ep=ep, expert_tp=expert_tp)
    # The content wins over the file name.
    known = {"tp": layout.tp, "pp": layout.pp, "ep": layout.ep, **config.facts}
    for word, hint in config.hints.items():
        if word in known and known[word] != hint:
            config.warnings.append(f"the file name says {word} {hint}, the content {known[word]}")
    if len(ranks) < layout.gpus:
        given_ranks = f"rank {ranks[0].rank}" if len(ranks) == 1 else f"{len(ranks)} ranks"
        config.warnings.append(
            f"only {given_ranks} of {layout.gpus} given: a slow GPU, a slow operation and waiting for another rank "
            "cannot be distinguished"
        )
    config.facts["basis"] = config.basis
    return config
