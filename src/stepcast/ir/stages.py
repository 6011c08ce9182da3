"""The layers of each pipeline stage."""

from functools import lru_cache
from itertools import accumulate, groupby, pairwise

from stepcast.ir.dataclass import dataclass
from stepcast.ir.model import Model
from stepcast.ir.schedules import SCHEDULES, ScheduleKind
from stepcast.ir.strategy import Strategy, StrategyError


@dataclass(frozen=True, slots=True)
class StagePiece:
    """Consecutive layers that a stage holds; with vpp > 1 it holds several pieces."""

    layers: range
    embedding: bool
    head: bool


def pieces(model: Model, strategy: Strategy) -> tuple[StagePiece, ...]:
    """Return the pipeline's pieces in model order, pp x vpp of them."""
    count, is_two_way = strategy.layout.pp * strategy.layout.vpp, strategy.schedule is ScheduleKind.DUALPIPE
    return _pieces(model.layers, count, strategy.stage_layers, strategy.further_tokens, is_two_way)


def describe_split(model: Model, strategy: Strategy) -> str:
    """Return the default split of layers that do not divide, such as ``7, 14 x 8, 7``; else nothing."""
    sizes = [len(piece.layers) for piece in pieces(model, strategy)]
    if strategy.stage_layers or len(set(sizes)) == 1:
        return ""
    runs = [(len(list(run)), size) for size, run in groupby(sizes)]
    split = ", ".join(f"{count} x {size}" if count > 1 else str(size) for count, size in runs)
    return f"{model.layers} layers over {len(sizes)} pieces as {split} (--stage-layers)"


def pieces_of_stage(strategy: Strategy, stage: int) -> tuple[int, ...]:
    """Return the pieces on one stage, chunk by chunk."""
    layout = strategy.layout
    return SCHEDULES[strategy.schedule].pieces_of_stage(stage, layout.pp, layout.vpp)


def spread_layers(layers: int, count: int, further_tokens: int = 0, two_way: bool = False) -> tuple[int, ...]:
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
    end = 1 + 2 * further_tokens
    share, rest = divmod(layers + 1 + end, count)
    # What is left over goes to the first pieces, after the one with the embedding where that rank saves the most.
    first = 0 if two_way else 1
    wanted = [share + (first <= piece < first + rest) for piece in range(count)]
    wanted[0] -= 1
    wanted[-1] -= end
    if min(wanted) < 1:  # nearly even
        share, rest = divmod(layers, count)
        wanted = [share + (piece < rest) for piece in range(count)]
    return tuple(wanted)


@lru_cache(maxsize=4096)
def _pieces(
    layers: int, count: int, given: tuple[int, ...], further_tokens: int, two_way: bool
) -> tuple[StagePiece, ...]:
    sizes = given
    if not sizes:
        even = layers % count == 0
        sizes = (layers // count,) * count if even else spread_layers(layers, count, further_tokens, two_way)
    if sum(sizes) != layers:
        raise StrategyError(f"stage layers {'+'.join(map(str, sizes))} = {sum(sizes)}, but the model has {layers}")
    ranges = [range(start, stop) for start, stop in pairwise(accumulate(sizes, initial=0))]
    return tuple(
        StagePiece(layers, embedding=index == 0, head=index == count - 1) for index, layers in enumerate(ranges)
    )
