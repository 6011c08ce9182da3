"""How many ranks share experts, told by the tokens that they exchange."""

from collections.abc import Mapping, Sequence

from stepcast.inputs.megatron.evidence import RankEvidence
from stepcast.ir.group import Group
from stepcast.ir.layout import Layout
from stepcast.ir.ranks import members

UNKNOWN_EP = (
    "how many ranks share experts (ep) can be told neither from the file names nor from the tokens they "
    "exchange: taken as 1, so that their exchanges keep the time of waiting; name the files with a "
    "field such as _exp8_"
)


def shares_experts(ranks: Sequence[RankEvidence]) -> bool:
    """Whether any rank communicates within its experts' group."""
    return any(rank.exchanges is not None for rank in ranks)


def possible_sizes(ranks: Sequence[RankEvidence], tp: int, dp: int) -> list[int]:
    """The sizes of expert-parallel groups, neighbours along dp, within which as many tokens come back as go
    out; nothing where no group was given whole. Rising: a multiple of a group that fits does too."""
    sent = {rank.rank: rank.exchanges for rank in ranks if rank.exchanges}
    found = []
    for size in (size for size in range(1, dp + 1) if dp % size == 0):
        layout = Layout(tp=tp, dp=dp, pp=max(sent) // (tp * dp) + 1, ep=size)
        groups: dict[tuple[int, ...], list[tuple[int, ...]]] = {}
        for rank, rows in sent.items():
            groups.setdefault(members(rank, Group.EP, layout), []).append(rows)
        whole = [group for group in groups.values() if len(group) == size]
        if whole and all(map(_keeps_tokens, whole)):
            found.append(size)
    return found


def _keeps_tokens(group: Sequence[tuple[int, ...]]) -> bool:
    """Exchanges come in pairs: out to the experts, and back."""
    if len({len(rows) for rows in group}) > 1 or len(group[0]) % 2:
        return False
    totals = [sum(rows) for rows in zip(*group, strict=True)]
    return totals[::2] == totals[1::2]


def is_even(ranks: Sequence[RankEvidence]) -> bool:
    """Whether every rank hands in the same each time, so that any size would fit."""
    return len({rows for rank in ranks if rank.exchanges for rows in rank.exchanges}) < 2


def expert_size(
    ranks: Sequence[RankEvidence], tp: int, dp: int, hints: Mapping[str, int]
) -> tuple[int | None, str]:
    """ep and how it is known; None where it cannot be told."""
    hint = hints.get("ep")
    if hint and tp * dp % hint:  # no stage of this run can form such groups
        hint = None
    if not shares_experts(ranks):
        return (hint or 1), ("file name" if hint else "read: no rank communicates between experts")
    sizes = possible_sizes(ranks, tp, dp)
    if hint is not None and (hint in sizes or not sizes or is_even(ranks)):
        return hint, "file name"
    if sizes and (dp == 1 or not is_even(ranks)):
        return sizes[0], "solved: tokens that go out to experts and come back"
    return None, "assumed"
