"""Finding repeats in a written-out list of layers, so that each is stored once with its count."""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from stepcast.ir.workload import Block, Layer, Variation

# The longest run of layers looked for as one repeating unit, e.g. a mixture-of-experts layer of nine rows.
LONGEST_UNIT = 64


class MicroBatches(NamedTuple):
    """One micro-batch that stands for *copies*, and the rows in which some of them differ from it."""

    base: Sequence[Layer]
    copies: int
    variations: tuple[Variation, ...]


def fold_micro_batches(body: Sequence[Layer], count: int) -> MicroBatches | None:
    """*body* as *count* micro-batches, or None where the names of their rows do not repeat.

    Rows may differ in what they hold: AICB writes other weight-gradient times for the first embedding. The
    base has at each place the row that most micro-batches have.
    """
    if count < 1 or len(body) % count:
        return None
    period = len(body) // count
    base = list(body[-period:])
    if body[:-period] == body[period:]:
        return MicroBatches(base, count, ())
    ids = _ids(body)
    variations: list[Variation] = []
    for position in range(period):
        column = ids[position::period]
        if column.count(column[-1]) == count:
            continue
        if any(body[at].name != base[position].name for at in range(position, len(body), period)):
            return None
        # Of equally many the last one, which is no first micro-batch with extra work.
        usual = max(reversed(column), key=Counter(column).__getitem__)
        base[position] = body[position + column.index(usual) * period]
        variations += [
            Variation(micro_batch, position, body[position + micro_batch * period])
            for micro_batch, number in enumerate(column)
            if number != usual
        ]
    variations.sort(key=lambda variation: (variation.micro_batch, variation.position))
    return MicroBatches(base, count, tuple(variations))


def fold_layers(layers: Sequence[Layer]) -> tuple[Block, ...]:
    """*layers* as blocks: at each place the repeating unit that covers most, else a plain run."""
    ids = _ids(layers)
    following = _next_same(ids)
    blocks: list[Block] = []
    plain_from = at = 0
    while at < len(layers):
        unit, count = _longest_repeat(ids, following, at)
        if count == 1:
            at += 1
            continue
        if plain_from < at:
            blocks.append(Block(tuple(layers[plain_from:at])))
        blocks.append(Block(tuple(layers[at : at + unit]), count))
        at += unit * count
        plain_from = at
    if plain_from < at:
        blocks.append(Block(tuple(layers[plain_from:])))
    return tuple(blocks)


def _ids(layers: Sequence[Layer]) -> list[int]:
    """A number for each layer, equal where the layers are; readers share equal layers as one object."""
    by_object: dict[int, int] = {}
    by_value: dict[Layer, int] = {}
    ids = []
    for layer in layers:
        number = by_object.get(id(layer))
        if number is None:
            number = by_object[id(layer)] = by_value.setdefault(layer, len(by_value))
        ids.append(number)
    return ids


def _next_same(ids: list[int]) -> list[int]:
    """For each place the next place with the same number, or the end."""
    last: dict[int, int] = {}
    following = [len(ids)] * len(ids)
    for at in range(len(ids) - 1, -1, -1):
        following[at] = last.get(ids[at], len(ids))
        last[ids[at]] = at
    return following


def _longest_repeat(ids: list[int], following: list[int], at: int) -> tuple[int, int]:
    """The unit length and count at *at* that cover the most layers; the shortest unit wins a tie."""
    best_unit, best_count = 1, 1
    second = following[at]
    while second < len(ids) and (unit := second - at) <= LONGEST_UNIT:
        pattern = ids[at:second]
        count = 1
        while ids[at + count * unit : at + (count + 1) * unit] == pattern:
            count += 1
        if count > 1 and count * unit > best_count * best_unit:
            best_unit, best_count = unit, count
        second = following[second]
    return best_unit, best_count
