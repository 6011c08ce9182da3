"""Which ranks form a group."""

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from stepcast.ir.layout import AXES, FAMILIES, Group, Layout

SIZES = st.sampled_from([1, 2, 3, 4, 6])


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    tp, cp, dp, pp = (draw(SIZES) for _ in range(4))
    ep = draw(st.sampled_from([size for size in (1, 2, 3, 4, 6, 12) if (cp * dp) % size == 0]))
    return Layout(tp=tp, cp=cp, ep=ep, dp=dp, pp=pp)


@given(layouts(), st.sampled_from(sorted(set(FAMILIES) - {"embedding"})))
def test_every_rank_is_in_exactly_one_group_of_a_family(layout: Layout, family: str) -> None:
    groups = layout.groups(family)
    assume(family != Group.MIRROR or layout.pp % 2 == 0)  # the stage in the middle has no mirror
    assert sorted(rank for ranks in groups for rank in ranks) == list(range(layout.gpus))
    assert len({len(ranks) for ranks in groups}) == 1
    for ranks in groups:
        assert ranks == tuple(sorted(ranks))
        assert layout.group(family, ranks[-1]) == ranks


@given(layouts())
def test_group_sizes(layout: Layout) -> None:
    size = {family: len(layout.group(family)) for family in FAMILIES}
    assert size["tp"] == layout.tp
    assert size["dp"] == layout.dp * layout.cp
    assert size["ep"] == layout.ep
    assert size["expert-dp"] == layout.expert_dp
    assert size["embedding"] == min(layout.pp, 2)
    assert size["world"] == layout.gpus
    assert size["model"] == layout.tp * layout.pp
    assert size == {family: layout.size(family) for family in FAMILIES}


@given(layouts())
def test_an_expert_group_and_its_replicas_cover_the_data_group(layout: Layout) -> None:
    peers = {rank for expert in layout.group("ep") for rank in layout.group("expert-dp", expert)}
    assert peers == set(layout.group("dp"))


def test_the_layout_of_megatron_for_16_gpus() -> None:
    """The example that Megatron-LM's initialize_model_parallel explains: tp 2, pp 4, dp 2."""
    layout = Layout(tp=2, dp=2, pp=4)
    assert layout.groups("tp")[:3] == ((0, 1), (2, 3), (4, 5))
    assert layout.groups("dp")[:4] == ((0, 2), (1, 3), (4, 6), (5, 7))
    assert layout.groups("pp") == ((0, 4, 8, 12), (1, 5, 9, 13), (2, 6, 10, 14), (3, 7, 11, 15))
    assert layout.groups("embedding")[0] == (0, 12)
    assert layout.neighbours("pp") == [([0, 1, 2, 3], (0, 4)), ([4, 5, 6, 7], (0, 4)), ([8, 9, 10, 11], (0, 4))]


def test_experts_without_tensor_parallelism_spread_over_the_tensor_ranks() -> None:
    layout = Layout(tp=4, dp=4, ep=8, expert_tp=1)
    assert layout.group("ep") == tuple(range(8))
    assert layout.group("expert-dp") == (0, 8)
    assert Layout(tp=4, dp=4, ep=4).group("ep") == (0, 4, 8, 12)


def test_bad_grids() -> None:
    with pytest.raises(ValueError, match="must divide"):
        Layout(dp=2, ep=4).groups("ep")


def test_unknown_family_and_rank() -> None:
    with pytest.raises(ValueError, match="unknown group 'mp'; known are tp, cp"):
        Layout().group("mp")
    with pytest.raises(ValueError, match="rank 4 is outside a world of 4"):
        Layout(tp=4).group("tp", 4)
    assert set(AXES) <= set(FAMILIES)


def test_ranks_of_a_stage_follow_one_another() -> None:
    """Stages vary slowest in Megatron-Core's order of ranks: 16 GPUs in 4 stages are 4 ranks each."""
    layout = Layout(tp=2, dp=2, pp=4)
    assert [layout.rank_of_stage(1, place) for place in range(4)] == [4, 5, 6, 7]
    assert layout.rank_of_stage(3) == 12
