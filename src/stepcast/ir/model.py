"""Model: an architecture with its weights, counted exactly; the layers of each pipeline stage, and the weights that a
rank holds and trains: all of them, or with LoRA the adapters alone.
"""

from collections import Counter
from functools import lru_cache
from itertools import accumulate, groupby, pairwise
from typing import NamedTuple

from stepcast.ir.architecture import NOTHING, Architecture, Shard, Weight, WeightPart, count_elements, shard_weights
from stepcast.ir.layers.ends import next_token_weights
from stepcast.ir.layers.kinds import adapter_shard, block_weights
from stepcast.ir.layers.lists import list_weights
from stepcast.ir.model_parts import FeedForward, LayerParts, Mixer
from stepcast.ir.schedules import SCHEDULES, PiecePlacement, ScheduleKind
from stepcast.ir.strategy import Objective, Strategy, StrategyError, TrainingKind
from stepcast.ir.types import ByIdentity, dataclass, group_by_key, require


@dataclass(frozen=True, slots=True)
class Model(Architecture):
    """The model that is simulated: Architecture has its widths and depth, this class counts its weights."""

    __hash__ = Architecture.__hash__  # a dataclass would make another

    @property
    def parameters(self) -> int:
        """All weights, tied ones once, without multi-token prediction modules."""
        return self.shard_of(range(self.layers), embedding=True, head=True).total

    @property
    def active_parameters(self) -> int:
        """Weights that take part in the forward of one token: of the routed experts, top_k."""
        if self.experts is None:
            return self.parameters
        weights = [weight for block in self.blocks for weight in self.block_weights(block)]
        routed = sum(weight.elements for weight in weights if weight.part is WeightPart.EXPERTS)
        return self.parameters - routed // self.experts.count * (self.experts.count - self.experts.top_k)

    @property
    def embedding_parameters(self) -> int:
        """Word and position embeddings with their norm or projection."""
        return count_elements(list_weights(self, "embedding"))

    @property
    def head_parameters(self) -> int:
        """The output projection; 0 where it is the word embedding again."""
        return count_elements(list_weights(self, "head")[1 if self.tied else 0 :])

    @property
    def next_token_parameters(self) -> int:
        """The multi-token-prediction modules, which share embedding and head with the model."""
        return count_elements(next_token_weights(self)) * self.next_token_layers

    def layer_parameters(self, layer: int) -> dict[WeightPart, int]:
        """Return the parameters of one layer, by part."""
        parts = group_by_key((weight.part, weight.elements) for weight in self.block_weights(self.blocks[layer]))
        return {part: sum(sizes) for part, sizes in parts.items()}

    def block_weights(self, block: LayerParts) -> tuple[Weight, ...]:
        """Return the tensors of a layer of this kind."""
        return block_weights(self, block.mixer, block.feed_forward)

    def shard_of(
        self, layers: range, tp: int = 1, ep: int = 1, expert_tp: int = 0, embedding: bool = False, head: bool = False
    ) -> Shard:
        """Return the shard of one rank of *layers*, with the *embedding* and with final norm and *head* if asked.

        A stage that has the head but not the embedding holds its own copy of tied weights, as Megatron
        does. *expert_tp* splits each expert; 0: as *tp*.
        """
        require(layers.step == 1, "a stage holds consecutive layers")
        is_inside = 0 <= layers.start <= layers.stop <= self.layers
        require(is_inside, f"layers {layers.start}..{layers.stop} reach outside the model's {self.layers}")
        for name, value in (("tp", tp), ("ep", ep), ("expert_tp", expert_tp or tp)):
            require(type(value) is int and value >= 1, f"{name} must be a whole number of at least 1, not {value!r}")
        return range_shard(self, layers, tp, ep, expert_tp or tp, embedding, head)


@lru_cache(maxsize=1024)
def next_token_shard(model: Architecture, tp: int, ep: int, expert_tp: int) -> Shard:
    """Return the shard of one rank of a multi-token-prediction module."""
    return shard_weights(model, next_token_weights(model), tp, ep, expert_tp)


@lru_cache(maxsize=16384)
def range_shard(
    model: Architecture, layers: range, tp: int, ep: int, expert_tp: int, embedding: bool, head: bool
) -> Shard:
    """Return the shard of one rank of consecutive *layers*; see Model.shard_of."""
    shards_before = _running_shards(model, tp, ep, expert_tp)
    ends = list_weights(model, "embedding") if embedding else ()
    if head:
        ends += list_weights(model, "final") + list_weights(model, "head")[1 if model.tied and embedding else 0 :]
    return shards_before[layers.stop] - shards_before[layers.start] + shard_weights(model, ends, tp, ep, expert_tp)


@lru_cache(maxsize=1024)
def _running_shards(model: Architecture, tp: int, ep: int, expert_tp: int) -> tuple[Shard, ...]:
    """Return the parameters of all layers before each layer."""
    shards: dict[tuple[Mixer, FeedForward], Shard] = {}
    for block in model.blocks:
        kind = (block.mixer, block.feed_forward)
        if kind not in shards:
            shards[kind] = shard_weights(model, block_weights(model, *kind), tp, ep, expert_tp)
    return tuple(accumulate((shards[block.mixer, block.feed_forward] for block in model.blocks), initial=NOTHING))


@dataclass(frozen=True, slots=True)
class StagePiece:
    """Consecutive layers that a stage holds; with vpp > 1 it holds several pieces."""

    layers: range
    embedding: bool
    head: bool
    copy: bool = False  # of the word embedding, next to an untied head, for multi-token prediction


def shares_words(model: Model, strategy: Strategy) -> bool:
    """Return True if the head multiplies by the word embedding; that of a reward model returns one number."""
    return model.tied and strategy.objective is not Objective.REWARD


def has_copies(model: Model, strategy: Strategy) -> bool:
    """Return True if the last stage has a copy of the word embedding, whose gradients are added to those of the first:
    as a tied head or, in Megatron-LM's core/models/gpt/gpt_model.py, to look up the tokens of multi-token prediction.
    """
    is_apart = strategy.layout.pp > 1 and SCHEDULES[strategy.schedule].placement is PiecePlacement.LOOP
    return is_apart and (shares_words(model, strategy) or strategy.mtp_layers > 0)


def pieces(model: Model, strategy: Strategy) -> tuple[StagePiece, ...]:
    """Return the pipeline's pieces in model order, pp x vpp of them."""
    return piece_kinds(model, strategy)[0]


def piece_kinds(model: Model, strategy: Strategy) -> tuple[tuple[StagePiece, ...], tuple[int, ...]]:
    """Return the pieces, and for each the first one with the same kinds of layers, frozen layers and ends."""
    count, is_two_way = strategy.layout.pp * strategy.layout.vpp, strategy.schedule is ScheduleKind.DUALPIPE
    copies = not model.tied and has_copies(model, strategy)
    split = count, strategy.stage_layers, strategy.mtp_layers, is_two_way
    return _find_pieces(model, *split, copies, strategy.trained_layers)


def describe_split(model: Model, strategy: Strategy) -> str:
    """Return the default split of layers that do not divide, such as ``7, 14 x 8, 7``; else nothing."""
    sizes = [len(piece.layers) for piece in pieces(model, strategy)]
    if strategy.stage_layers or len(set(sizes)) == 1:
        return ""
    runs = [(len(list(run)), size) for size, run in groupby(sizes)]
    split = ", ".join(f"{count} x {size}" if count > 1 else str(size) for count, size in runs)
    return f"{model.layers} layers over {len(sizes)} pieces as {split} (--stage-layers)"


@lru_cache(maxsize=4096)
def count_blocks(model: Model, layers: range) -> list[tuple[LayerParts, int]]:
    """Return the kinds of consecutive *layers*, and how many of each follow one another."""
    return [(block, len(list(run))) for block, run in groupby(model.blocks[layers.start : layers.stop])]


def pieces_of_stage(strategy: Strategy, stage: int) -> tuple[int, ...]:
    """Return the pieces on one stage, chunk by chunk."""
    return pieces_of_stages(strategy.schedule, strategy.layout.pp, strategy.layout.vpp)[stage]


@lru_cache(maxsize=1024)
def pieces_of_stages(schedule: ScheduleKind, pp: int, vpp: int) -> list[tuple[int, ...]]:
    """Return the pieces on each stage."""
    return [SCHEDULES[schedule].pieces_of_stage(stage, pp, vpp) for stage in range(pp)]


class StageKind(NamedTuple):
    """Stages of the same pieces."""

    stages: list[int]
    pieces: list[StagePiece]
    layers: list[int]  # of each piece
    heads: list[int]  # pieces with the output projection
    embedding: bool


def find_stage_kinds(model: Model, strategy: Strategy) -> list[StageKind]:
    """Return the kinds of stages, in one list for all strategies that cut the model in the same way."""
    placement = strategy.schedule, strategy.layout.pp, strategy.layout.vpp
    return _STAGE_KINDS.of(piece_kinds(model, strategy), _list_stage_kinds, placement)


_STAGE_KINDS: ByIdentity[list[StageKind]] = ByIdentity(1024)


def _list_stage_kinds(
    split: tuple[tuple[StagePiece, ...], tuple[int, ...]], placement: tuple[ScheduleKind, int, int]
) -> list[StageKind]:
    (every, first), kinds = split, []
    own_first = [tuple([first[index] for index in own]) for own in pieces_of_stages(*placement)]
    for own, stages in group_by_key(zip(own_first, range(len(own_first)), strict=True)).items():
        pieces = [every[index] for index in own]
        heads = [number for number, piece in enumerate(pieces) if piece.head]
        layers, embedding = [len(piece.layers) for piece in pieces], any(piece.embedding for piece in pieces)
        kinds.append(StageKind(stages, pieces, layers, heads, embedding))
    return kinds


def spread_layers(layers: int, count: int, mtp_layers: int = 0, two_way: bool = False) -> tuple[int, ...]:
    """Spread *layers* over *count* pieces when they do not divide: embedding and head each weigh one layer.

    So do Llama 3 (2024, section 3.3.2), torchtitan and Megatron-Core
    (account_for_embedding_in_pipeline_split, account_for_loss_in_pipeline_split), where the loss, then the
    embedding too, may have a piece to itself. Each MTP layer has a block and a head
    in the last piece. In a *two_way* pipeline the rank of the embedding saves no more micro-batches than others.
    """
    if count == 1:
        return (layers,)
    if layers + 2 < count:
        raise StrategyError(
            f"{layers} layers, the embedding and the loss cannot fill pp x vpp = {count} pieces: "
            f"use at most {layers + 2}"
        )
    if layers < count:
        return (layers + 2 - count, *(1,) * (count - 2), 0)
    end = 1 + 2 * mtp_layers
    share, rest = divmod(layers + 1 + end, count)
    # What is left over goes to the first pieces, after the one with the embedding where that rank saves the most.
    first = 0 if two_way else 1
    shares = [share + (first <= piece < first + rest) for piece in range(count)]
    shares[0] -= 1
    shares[-1] -= end
    if min(shares) < 1:  # nearly even
        share, rest = divmod(layers, count)
        shares = [share + (piece < rest) for piece in range(count)]
    return tuple(shares)


@lru_cache(maxsize=4096)
def _find_pieces(
    model: Model, count: int, stage_layers: tuple[int, ...], mtp_layers: int, two_way: bool, copies: bool, trained: int
) -> tuple[tuple[StagePiece, ...], tuple[int, ...]]:
    total = model.layers
    even = () if total % count else (total // count,) * count
    sizes = stage_layers or even or spread_layers(total, count, mtp_layers, two_way)
    if sum(sizes) != total:
        raise StrategyError(f"stage layers {'+'.join(map(str, sizes))} = {sum(sizes)}, but the model has {total}")
    every, keys = [], []
    for index, (start, stop) in enumerate(pairwise(accumulate(sizes, initial=0))):
        layers, is_first, is_last = range(start, stop), index == 0, index == count - 1
        every.append(StagePiece(layers, is_first, is_last, copies and is_last))
        keys.append((is_first, is_last, count_frozen(model, trained, layers), *model.blocks[start:stop]))
    return tuple(every), tuple(map(keys.index, keys))


ENDS = (WeightPart.EMBEDDING, WeightPart.POSITION, WeightPart.HEAD)


def held_shard(model: Model, strategy: Strategy, piece: StagePiece) -> Shard:
    """Return the model's own weights that one rank holds of *piece*, before data-parallel ranks split them."""
    layout = strategy.layout
    sizes = (layout.tp, layout.ep, layout.expert_tp_size)
    shard = range_shard(model, piece.layers, *sizes, piece.embedding, piece.head)
    if piece.head and not piece.embedding and model.tied and not shares_words(model, strategy):
        shard = shard - shard_weights(model, list_weights(model, "head")[:1], *sizes)
    if not (piece.head and strategy.mtp_layers):
        return shard
    # Repeated for more tokens, the module's weights are the same (Megatron-Core's mtp_use_repeated_layer).
    modules = min(strategy.mtp_layers, model.next_token_layers)
    copied = shard_weights(model, list_weights(model, "embedding"), *sizes) if piece.copy else NOTHING
    return sum([next_token_shard(model, *sizes)] * modules, start=shard + copied)


def count_frozen(model: Model, trained_layers: int, layers: range) -> int:
    """Return how many of *layers* lie below the last *trained_layers*, and so run no backward; 0: all are trained."""
    return min(len(layers), max(0, model.layers - trained_layers - layers.start)) if trained_layers else 0


def _trained_piece(model: Model, strategy: Strategy, piece: StagePiece) -> StagePiece:
    """Return the part of *piece* whose own weights are trained."""
    if not strategy.trained_layers:
        return piece
    return StagePiece(piece.layers[count_frozen(model, strategy.trained_layers, piece.layers) :], False, False)


def trained_shard(model: Model, strategy: Strategy, piece: StagePiece) -> Shard:
    """Return the weights that have gradients and optimizer states."""
    if strategy.training is TrainingKind.FULL:
        return held_shard(model, strategy, _trained_piece(model, strategy, piece))
    layout, adapters = strategy.layout, (strategy.lora_targets, strategy.lora_separate)
    spread = (strategy.lora_rank, layout.tp, layout.ep, layout.expert_tp_size, *adapters)
    blocks = model.blocks[piece.layers.start : piece.layers.stop]
    return sum((adapter_shard(model, block.mixer, block.feed_forward, *spread) for block in blocks), start=NOTHING)


@dataclass(frozen=True, slots=True)
class Matrices:
    """*count* equal matrices on one rank, or its parts of them."""

    count: int
    rows: int
    columns: int
    part: WeightPart

    @property
    def elements(self) -> int:
        return self.count * self.rows * self.columns

    @property
    def inside(self) -> bool:
        """Return True if they belong to a layer, not to an end of the model."""
        return self.part not in ENDS


def trained_matrices(model: Model, strategy: Strategy, piece: StagePiece) -> tuple[Matrices, ...]:
    """Return the matrices among the weights that one rank trains of *piece*, equal ones together."""
    layout, piece = strategy.layout, _trained_piece(model, strategy, piece)
    weights = [weight for layer in piece.layers for weight in model.block_weights(model.blocks[layer])]
    if piece.embedding or piece.copy:
        weights += list_weights(model, "embedding")
    if piece.head:
        is_held = model.tied and (piece.embedding or not shares_words(model, strategy))
        weights += list_weights(model, "head")[1 if is_held else 0 :]
        if strategy.mtp_layers:
            weights += next_token_weights(model) * min(strategy.mtp_layers, model.next_token_layers)
    sizes = (layout.tp, layout.ep, layout.expert_tp_size, model.padded_vocab(layout.tp))
    counts: Counter[tuple[int, int, WeightPart]] = Counter()
    for weight, repeats in Counter(weights).items():
        if weight.inputs_split is not None:
            count, rows, columns = weight.matrices_on_rank(*sizes)
            counts[rows, columns, weight.part] += count * repeats
    return tuple(Matrices(count, *shape) for shape, count in counts.items())
