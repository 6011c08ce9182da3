"""Finding repeats in a written-out list of layers, so that each is stored once with its count."""

from collections.abc import Sequence
from typing import NamedTuple

from stepcast.ir.workload import Block, Layer, Variation

# The longest run of layers looked for as one repeating unit, e.g. a mixture-of-experts layer of nine rows.
LONGEST_UNIT = 64
# Rows that may differ between micro-batches before they no longer count as copies of one.
MOST_VARIED = 0.05


class MicroBatches(NamedTuple):
    """One micro-batch that stands for *count*, and the rows in which some of them differ from it."""

    base: Sequence[Layer]
    count: int
    variations: tuple[Variation, ...]


def fold_micro_batches(body: Sequence[Layer], count: int) -> MicroBatches | None:
    """*body* as *count* micro-batches, or None where it is not that.

    Rows may differ in few places: AICB writes other weight-gradient times for the first embedding.
    """
    if count < 1 or len(body) % count:
        return None
    period = len(body) // count
    base = body[-period:]
    variations: list[Variation] = []
    if body[:-period] != body[period:]:
        for micro_batch in range(count - 1):
            written = body[micro_batch * period : (micro_batch + 1) * period]
            if written == base:
                continue
            for position, (layer, usual) in enumerate(zip(written, base, strict=True)):
                if layer.name != usual.name:
                    return None
                if layer != usual:
                    variations.append(Variation(micro_batch, position, layer))
            if len(variations) > len(body) * MOST_VARIED:
                return None
    return MicroBatches(base, count, tuple(variations))


def fold_layers(layers: Sequence[Layer]) -> tuple[Block, ...]:
    """*layers* as blocks: at each place the repeating unit that covers most, else a plain run."""
    blocks: list[Block] = []
    plain: list[Layer] = []
    at = 0
    while at < len(layers):
        unit, count = _longest_repeat(layers, at)
        if count == 1:
            plain.append(layers[at])
            at += 1
            continue
        if plain:
            blocks.append(Block(tuple(plain)))
            plain = []
        blocks.append(Block(tuple(layers[at : at + unit]), count))
        at += unit * count
    if plain:
        blocks.append(Block(tuple(plain)))
    return tuple(blocks)


def _longest_repeat(layers: Sequence[Layer], at: int) -> tuple[int, int]:
    """The unit length and count at *at* that cover the most layers; the shortest unit wins a tie."""
    best_unit, best_count = 1, 1
    first = layers[at]
    for unit in range(1, min(LONGEST_UNIT, (len(layers) - at) // 2) + 1):
        if layers[at + unit] is not first and layers[at + unit] != first:
            continue
        pattern = layers[at : at + unit]
        count = 1
        while layers[at + count * unit : at + (count + 1) * unit] == pattern:
            count += 1
        if count > 1 and count * unit > best_count * best_unit:
            best_unit, best_count = unit, count
    return best_unit, best_count
