"""Which GPUs of a rack a job gets, and what that means for its groups."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepcast import Layout, Options, Place, Strategy, load_cluster, load_model, predict
from stepcast.cli.main import main
from stepcast.hardware import group_path
from stepcast.hardware.path import FILLED, place_ranks
from stepcast.ir.step import StepReport
from stepcast.questions.question import PLACES as WORDS

RACKS = load_cluster("gb200-nvl72")
HOSTS = load_cluster("dgx-h100")
MODEL = load_model("llama-3.1-8b")


def step_s(gpus: int, place: Place, tp: int = 1) -> float:
    return forecast(gpus, place, tp).step_s


def forecast(gpus: int, place: Place, tp: int = 1) -> StepReport:
    plan = Strategy(Layout(tp=tp, dp=gpus // tp), 1, gpus // tp, 8192, sequence_parallel=tp > 1)
    return predict(MODEL, RACKS, plan, options=Options(place=place)).report


def test_words_are_those_of_the_table() -> None:
    assert set(WORDS) == {str(place) for place in Place}


def test_equal_parts_are_those_of_a_scheduler() -> None:
    """512 GPUs of NVL72 racks are 8 segments of 16 trays, as MLPerf's GB200 runs ask Slurm for."""
    assert place_ranks(Place.EVEN, RACKS, 512) == (64,) * 8
    assert place_ranks(Place.EVEN, RACKS, 576) == (72,) * 8
    assert place_ranks(Place.EVEN, RACKS, 504) == (72,) * 7
    assert place_ranks(Place.EVEN, RACKS, 520) == (68,) * 2 + (64,) * 6
    assert place_ranks(Place.EVEN, RACKS, 576, (64,)) == (64,) * 9  # whole expert groups
    assert place_ranks(Place.EVEN, RACKS, 64) == place_ranks(Place.PACKED, RACKS, 512) == FILLED


@given(st.integers(1, 4000), st.sampled_from([1, 2, 4, 8, 16, 32, 64]))
def test_racks_get_whole_nodes_in_nearly_equal_parts(nodes: int, tp: int) -> None:
    gpus = 4 * nodes
    held = place_ranks(Place.EVEN, RACKS, gpus, (tp,))
    if not held:
        assert gpus <= 72
        return
    assert sum(held) == gpus
    assert max(held) <= 72
    assert all(part % 4 == 0 for part in held)
    unit = max(4, tp) if gpus % max(4, tp) == 0 else 4
    assert max(held) - min(held) <= unit
    assert all(part % unit == 0 for part in held)


def test_hosts_are_filled_in_order_whatever_the_place() -> None:
    for gpus in (12, 500, 512):
        assert place_ranks(Place.EVEN, HOSTS, gpus) == FILLED
        layout = Layout(tp=2, dp=gpus // 2)
        assert group_path(HOSTS, layout, "dp", Place.EVEN) == group_path(HOSTS, layout, "dp", Place.PACKED)


def test_tensor_groups_stay_in_one_rack() -> None:
    for tp in (8, 16, 32, 64):
        assert group_path(RACKS, Layout(tp=tp, dp=2048 // tp), "tp").nodes == 1
    assert group_path(RACKS, Layout(tp=16, dp=32), "tp", Place.PACKED).nodes == 2


@pytest.mark.parametrize(("tp", "slower"), [(1, 1.02), (8, 1.2)])
def test_512_gpus_are_no_slower_than_504_or_576(tp: int, slower: float) -> None:
    around = max(step_s(504, Place.EVEN, tp), step_s(576, Place.EVEN, tp))
    assert step_s(512, Place.EVEN, tp) < 1.01 * around
    assert step_s(512, Place.PACKED, tp) > slower * around
    for gpus in (504, 576):
        assert step_s(gpus, Place.PACKED, tp) == step_s(gpus, Place.EVEN, tp)


def test_a_rank_alone_in_a_rack_is_reported() -> None:
    (warning,) = forecast(512, Place.PACKED, 8).warnings
    assert warning.startswith("a dp group of 64 ranks is spread over 8 racks, 9 on the fullest and 1 on the emptiest")
    assert "--place even" in warning
    assert forecast(512, Place.EVEN, 8).warnings == ()


def test_the_verbs_place_ranks_equally(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["collective", "all-reduce", "--size", "1GiB", "--ranks", "512", "--cluster", "gb200-nvl72", "--json"]
    times = {}
    for place in WORDS:
        assert main([*words, "--place", place]) == 0
        found = json.loads(capsys.readouterr().out)
        times[place] = found["time_s"]
        assert bool(found["warnings"]) == (place == "packed")
    assert times["packed"] > 1.5 * times["even"]
    assert main([*words, "--place", "packed", "--ranks-per-node", "8"]) == 2
    assert "--ranks-per-node places the ranks" in capsys.readouterr().err


def test_a_place_without_racks_is_noted(capsys: pytest.CaptureFixture[str]) -> None:
    words = "predict --model llama-3.1-8b --cluster dgx-h100 --gpus 12 --place packed --json"
    assert main(words.split()) == 0
    printed = capsys.readouterr()
    assert "--place has no effect: no rack of dgx-h100 is one NVLink domain" in printed.err
    (warning,) = json.loads(printed.out)["warnings"]
    assert warning == (
        "a dp group of 12 ranks is spread over 2 nodes, 8 on the fullest and 4 on the emptiest, whose links "
        "limit all of them: choose a number of GPUs that fills every node equally"
    )
