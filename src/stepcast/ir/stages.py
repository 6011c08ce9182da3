"""Which layers each pipeline stage holds."""

from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise

from stepcast.ir.model import Model
from stepcast.ir.strategy import ScheduleKind, Strategy, StrategyError


@dataclass(frozen=True, slots=True)
class Piece:
    """Consecutive layers that a stage holds; with vpp > 1 it holds several pieces."""

    layers: range
    embedding: bool
    head: bool


def pieces(model: Model, strategy: Strategy) -> tuple[Piece, ...]:
    """The pipeline's pieces in model order, pp x vpp of them."""
    return _pieces(model.layers, strategy.layout.pp * strategy.layout.vpp, strategy.stage_layers)


def pieces_of_stage(strategy: Strategy, stage: int) -> tuple[int, ...]:
    """The pieces on one stage, chunk by chunk.

    Zero-bubble V lays two pieces down the stages and back up; DualPipe runs the model from both ends, so
    that a stage holds its own piece and that of the stage at the other side.
    """
    pp, vpp = strategy.layout.pp, strategy.layout.vpp
    match strategy.schedule:
        case ScheduleKind.ZB_V if vpp == 2:
            return (stage, 2 * pp - 1 - stage)
        case ScheduleKind.DUALPIPE if pp > 1:
            return (stage, pp - 1 - stage)
    return tuple(range(stage, pp * vpp, pp))


def even_layers(layers: int, count: int, further_tokens: int = 0) -> tuple[int, ...]:
    """*layers* over *count* pieces when they do not divide: embedding and head each weigh one layer.

    So do Llama 3 (2024, section 3.3.2) and torchtitan. Each further token that is predicted has a block and
    a head in the last piece.
    """
    if count == 1:
        return (layers,)
    if layers < count:
        raise StrategyError(f"{layers} layers cannot fill {count} pieces: use at most {layers}")
    end = 1 + 2 * further_tokens
    share, rest = divmod(layers + 1 + end, count)
    # What is left over goes to the first pieces after the one with the embedding.
    wanted = [share + (1 <= piece <= rest) for piece in range(count)]
    wanted[0] -= 1
    wanted[-1] -= end
    return tuple(wanted) if min(wanted) >= 1 else _nearly_even(layers, count)


def _nearly_even(layers: int, count: int) -> tuple[int, ...]:
    share, rest = divmod(layers, count)
    return tuple(share + (piece < rest) for piece in range(count))


@lru_cache(maxsize=4096)
def _pieces(layers: int, count: int, given: tuple[int, ...]) -> tuple[Piece, ...]:
    sizes = given
    if not sizes:
        if layers % count:
            raise StrategyError(_uneven(layers, count))
        sizes = (layers // count,) * count
    if sum(sizes) != layers:
        raise StrategyError(
            f"stage layers {'+'.join(map(str, sizes))} = {sum(sizes)}, but the model has {layers}"
        )
    ranges = [range(start, stop) for start, stop in pairwise(accumulate(sizes, initial=0))]
    return tuple(
        Piece(layers, embedding=index == 0, head=index == count - 1) for index, layers in enumerate(ranges)
    )


def _uneven(layers: int, count: int) -> str:
    near = min(
        (ways for ways in range(1, layers + 1) if layers % ways == 0), key=lambda ways: abs(ways - count)
    )
    message = f"{layers} layers do not split evenly over pp x vpp = {count}: {near} does"
    if layers >= count:
        message += f", or give stage layers such as {','.join(map(str, even_layers(layers, count)))}"
    return message
