"""Workload files on clusters: known answers, lower bounds, and clear refusals."""

import pytest

from stepcast.forecast.options import Options
from stepcast.forecast.simulate import simulate
from stepcast.hardware import load_cluster
from stepcast.inputs.table import read
from stepcast.simulation.chunks import Body
from stepcast.simulation.unfolded import simulate_jitter
from tests.shared import DATA, ROOT, needs_data

GPT_13B = ROOT / "examples" / "simai-gpt-13b.txt"
LLAMA_405B = ROOT / "examples" / "simai-llama-405b.txt"
GPT2_LARGE = ROOT / "examples" / "optable-gpt2-large.tsv"
BARE_100G = ["node.gpus=1", "node.nics=1", "node.nic.bandwidth=100 Gb/s", "node.nic.efficiency=1.0"]


@needs_data("neusight")
def test_operator_table_with_32_ranks_at_100_gigabits() -> None:
    """The known answer of the table with its backward restored: 6874.5 ms, 3.1 ms of it exposed."""
    workload = read(DATA / "neusight" / "seed004_with_backward.csv")
    options = Options(gpus=32, ideal_communication=True)
    report = simulate(workload, load_cluster("generic", BARE_100G), options).report
    assert report.step_s == pytest.approx(6.8745, abs=1e-4)
    assert report.communication_s["dp"].exposed_s == pytest.approx(0.0031, abs=1e-4)


@pytest.mark.parametrize("cluster", ["dgx-a100", "dgx-h100"])
@pytest.mark.parametrize("path", [GPT_13B, LLAMA_405B], ids=lambda path: path.stem)
def test_simai_workloads_never_beat_compute_plus_the_ideal_bubble(path, cluster: str) -> None:  # type: ignore[no-untyped-def]
    workload = read(path)
    report = simulate(workload, load_cluster(cluster)).report
    assert sum(report.breakdown_s.values()) == pytest.approx(report.step_s, rel=1e-12)
    stages, chunks = workload.layout.pp, workload.layout.vpp
    compute_s = report.breakdown_s["compute"]
    # With fewer micro-batches than stages interleaving cannot help: the ideal is one pass down and up.
    rounds = workload.micro_batches * (chunks if workload.micro_batches >= stages else 1)
    assert report.step_s >= compute_s * (1 + (stages - 1) / rounds) * 0.999
    assert report.low_s <= report.step_s <= report.high_s


def test_a_body_that_lists_the_whole_model_is_suspected_and_can_be_split() -> None:
    workload = read(GPT_13B)
    cluster = load_cluster("dgx-h100")
    as_stage = simulate(workload, cluster).report
    as_model = simulate(workload, cluster, Options(body=Body.MODEL)).report
    assert any("--body model" in warning for warning in as_stage.warnings)
    assert not any("--body model" in warning for warning in as_model.warnings)
    assert as_model.step_s < as_stage.step_s / 5


def test_more_bandwidth_is_never_slower() -> None:
    workload = read(LLAMA_405B)
    steps_s = [
        simulate(workload, load_cluster("dgx-h100", [f"node.nic.bandwidth={rate} Gb/s"])).report.step_s
        for rate in (100, 200, 400, 800)
    ]
    assert steps_s == sorted(steps_s, reverse=True)


def test_the_same_input_gives_the_same_bits() -> None:
    workload, cluster = read(LLAMA_405B), load_cluster("dgx-h100")
    first, second = (simulate(workload, cluster) for _ in range(2))
    assert first.report == second.report
    assert simulate_jitter(first.step, 0.05, 3, seed=7) == simulate_jitter(second.step, 0.05, 3, seed=7)
    assert simulate_jitter(first.step, 0.05, 3, seed=7) != simulate_jitter(second.step, 0.05, 3, seed=8)


def test_the_critical_path_fills_the_step() -> None:
    prediction = simulate(read(LLAMA_405B), load_cluster("dgx-h100"))
    assert prediction.critical_path.duration_s.sum() == pytest.approx(prediction.report.step_s, rel=1e-9)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (Options(gpus=1000), "not a multiple of tp x cp x pp = 128"),
        (Options(schedule="zigzag"), "unknown schedule 'zigzag'"),
    ],
)
def test_impossible_options_are_refused(options: Options, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        simulate(read(LLAMA_405B), load_cluster("dgx-h100"), options)


def test_a_cluster_that_is_too_small_is_refused() -> None:
    with pytest.raises(ValueError, match=r"needs 1024 GPUs and cluster .* has 16"):
        simulate(read(LLAMA_405B), load_cluster("dgx-h100", ["nodes=2"]))
