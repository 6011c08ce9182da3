"""``stepcast plan`` and ``predict --tokens`` from outside."""

import csv
from pathlib import Path

import pytest

from tests.cli.test_main import run, run_json

pytestmark = pytest.mark.slow

SMALL = ("--model", "llama-3.1-8b", "--cluster", "dgx-h100", "--gpus", "64", "--global-batch", "512")
MEASURED = ("--gpus", "512", "--step-s", "4", "--steps", "100000", "--checkpoint-size", "1TB")


def test_no_failures_is_exactly_steps_times_step(capsys: pytest.CaptureFixture[str]) -> None:
    found = run_json(capsys, "plan", "--gpus", "64", "--step-s", "2", "--steps", "1000", "--failures", "none")
    assert found["days"]["mean"] * 86400 == 2000
    assert found["gpu_hours"] == pytest.approx(64 * 2000 / 3600)
    assert found["goodput"] == 1


def test_checkpoints_that_cannot_be_so_frequent_get_a_warning(capsys: pytest.CaptureFixture[str]) -> None:
    for every, expected in (("5s", "--checkpoint-every 5s: checkpoints are "), ("1h", "")):
        found = run_json(capsys, "plan", *SMALL, "--tokens", "1T", "--checkpoint-every", every)
        assert "".join(found["warnings"]).startswith(expected)
        assert bool(found["warnings"]) == bool(expected)


def test_a_plan_of_a_prediction(capsys: pytest.CaptureFixture[str]) -> None:
    step = run_json(capsys, "predict", *SMALL)
    found = run_json(capsys, "plan", *SMALL, "--tokens", "1T", "--price", "2.5/gpu-hour")
    assert found["steps"] == -(-int(1e12) // (512 * 4096))
    ideal = found["steps"] * step["step_s"] / 86400
    assert found["days"]["without_interruption"] == pytest.approx(ideal)
    assert found["days"]["p10"] <= found["days"]["median"] <= found["days"]["p90"]
    assert found["cost"] == pytest.approx(2.5 * found["gpu_hours"])
    assert sum(found["split_s"].values()) == pytest.approx(found["days"]["mean"] * 86400)
    assert found["step_band_days"]["low"] < found["days"]["median"] < found["step_band_days"]["high"]
    # bf16 weights, their fp32 copy and two moments.
    assert found["checkpoint_bytes"] == pytest.approx(14 * 8.03e9, rel=0.001)


def test_a_checkpoint_has_the_weights_and_the_states_of_those_that_are_trained(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def size(*choices: str) -> float:
        found = run_json(capsys, "plan", *SMALL, "--tokens", "1B", *choices)
        return float(found["checkpoint_bytes"])

    # Adapters in fp32 with two moments each: peft trains 16 x (4,096 + 4,096) + 16 x (4,096 + 1,024) parameters of
    # query and value in each of 32 layers, 41,943,040 of all linear layers.
    assert size("--lora-rank", "16", "--lora-targets", "query,value") == 12 * 32 * 16 * (8192 + 5120)
    assert size("--lora-rank", "16") == 12 * 41_943_040
    # All weights in bf16; the fp32 copy and two moments of a layer's 218,112,000 parameters.
    weights = size("--train-layers", "2") - 2 * 12 * 218_112_000
    assert weights == pytest.approx(2 * 8.03e9, rel=0.001)


TOO_LARGE = ("plan", "llama-3.1-405b", "--cluster", "dgx-h100", "--gpus", "128", "--tokens", "1T")


def test_a_run_that_does_not_fit_is_refused_with_the_remedies_of_predict(capsys: pytest.CaptureFixture[str]) -> None:
    status, printed, complaint = run(capsys, *TOO_LARGE)
    assert status == 1
    assert not printed
    assert complaint.count("\n") == 1
    assert "does not fit into GPU memory" in complaint
    assert "--allow-oom" in complaint
    # 405.9e9 parameters: bf16 weights and fp32 gradients alone are 6 bytes each on every GPU.
    step = run_json(capsys, "predict", *TOO_LARGE[1:6])
    assert step["memory_bytes"]["total"] > 6 * 405e9
    assert step["remedies"]
    assert all(each["options"] in complaint for each in step["remedies"])


def test_a_run_that_does_not_fit_is_planned_only_if_allowed(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    page = tmp_path / "plan.html"
    found = run_json(capsys, *TOO_LARGE, "--allow-oom", "--html", str(page))
    (phase,) = found["phases"]
    assert phase["memory_bytes"]["fits"] is False
    assert phase["memory_bytes"]["total"] > phase["memory_bytes"]["capacity"]
    assert "does not fit into GPU memory" in found["warnings"][0]
    assert "DOES NOT FIT" in page.read_text()
    _, printed, _ = run(capsys, *TOO_LARGE, "--allow-oom")
    assert "DOES NOT FIT" in printed


def test_every_stage_has_a_memory_verdict(capsys: pytest.CaptureFixture[str]) -> None:
    stages = ("--stage", "steps=1000", "--stage", "steps=500,seq=131072,global-batch=64")
    status, _, complaint = run(capsys, "plan", *SMALL, *stages)
    assert status == 1
    assert "stage 2 of the run does not fit" in complaint
    found = run_json(capsys, "plan", *SMALL, *stages, "--allow-oom")
    assert [phase["memory_bytes"]["fits"] for phase in found["phases"]] == [True, False]


def test_memory_of_a_measured_step_is_not_checked(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_json(capsys, "plan", *MEASURED)["phases"][0]["memory_bytes"] is None
    _, printed, _ = run(capsys, "plan", *MEASURED)
    assert "memory         not checked" in printed


def test_fewer_replicas_of_a_measured_run_follow_from_its_layout(capsys: pytest.CaptureFixture[str]) -> None:
    """Of 64 replicas one node holds one, of 2 it takes half of the GPUs along."""
    words = ("plan", *MEASURED, "--spares", "0", "--shrink", "--repair", "share=1,takes=3d")
    many, few = (
        run_json(capsys, *words, *layout)["split_s"]["missing_replicas"] for layout in (("--tp", "8"), ("--dp", "2"))
    )
    assert 0 < many < few / 4


@pytest.mark.parametrize(
    ("words", "shown"), [((), "$"), (("--currency", "EUR"), " EUR"), (("--currency", "\u20ac"), "\u20ac")]
)
def test_money_has_a_currency(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, words: tuple[str, ...], shown: str
) -> None:
    page = tmp_path / "plan.html"
    # 64 GPUs for 2,000 steps of 9 s: 320 GPU-hours at 50 are 16,000.
    asked = ("--gpus", "64", "--step-s", "9", "--steps", "2000", "--failures", "none", "--price", "50")
    found = run_json(capsys, "plan", *asked, *words, "--html", str(page))
    assert found["cost"] == pytest.approx(16000)
    assert found["currency"] == shown.strip()
    money = f"{shown}16,000" if shown != " EUR" else "16,000 EUR"
    assert money in run(capsys, "plan", *asked, *words)[1]
    assert money in page.read_text()
    step = run_json(capsys, "predict", *SMALL, "--tokens", "1T", "--price", "2", *words)
    assert step["training"]["currency"] == shown.strip()


def test_energy_says_whose_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("plan", *SMALL, "--tokens", "1T", "--failures", "none")
    gpus = run_json(capsys, *words)
    assert any("what GPUs draw" in note for note in gpus["assumptions"])
    whole = run_json(capsys, *words, "--pue", "1.25")
    assert not any("what GPUs draw" in note for note in whole["assumptions"])
    assert whole["energy_mwh"] == pytest.approx(1.25 * gpus["energy_mwh"])
    _, out, _ = run(capsys, *words)
    assert "\n\ndefaults used:\n" in out
    assert out.count("\n\ndefaults used:\n") == 1  # one paragraph


def test_predict_tells_days_and_cost(capsys: pytest.CaptureFixture[str]) -> None:
    found = run_json(capsys, "predict", *SMALL, "--tokens", "1T", "--price", "2")["training"]
    assert found["days"] == pytest.approx(found["gpu_hours"] / 64 / 24)
    assert found["cost"] == pytest.approx(2 * found["gpu_hours"])
    status, printed, _ = run(capsys, "predict", *SMALL, "--tokens", "1T")
    assert status == 0
    assert "1T tokens" in printed
    assert "GPU-hours" in printed


def test_stages_follow_each_other(capsys: pytest.CaptureFixture[str]) -> None:
    stages = ("--stage", "steps=1000", "--stage", "steps=500,seq=32768,cp=4,global-batch=64,sharding=zero-3")
    found = run_json(capsys, "plan", *SMALL, *stages)
    first, second = found["phases"]
    assert found["steps"] == 1500
    assert second["tokens_per_step"] == 32768 * 64
    assert first["tokens_per_step"] == 4096 * 512
    assert found["tokens"] == 1000 * 4096 * 512 + 500 * 32768 * 64


def test_until_a_date_is_the_inverse_of_days(capsys: pytest.CaptureFixture[str]) -> None:
    found = run_json(capsys, "plan", *MEASURED[:4], *MEASURED[6:], "--from", "2026-12-01", "--until", "2026-12-31")
    assert found["days"]["closed_form"] == pytest.approx(30, rel=1e-3)
    assert found["days"]["closed_form"] <= 30


def test_more_of_anything_bad_takes_longer(capsys: pytest.CaptureFixture[str]) -> None:
    usual = run_json(capsys, "plan", *MEASURED)["days"]["closed_form"]
    for worse in (
        ("--mtbf", "gpu=5000h"),
        ("--blocking", "--node-write", "100MB/s"),
        ("--restart", "detect=30m"),
        ("--stragglers", "per-node-day=1,for=1h,slower=0.5"),
        ("--evaluate", "every=100,for=1m"),
        ("--checkpoint-every", "20h"),
        ("--spares", "0", "--repair", "share=1,takes=3d"),
    ):
        assert run_json(capsys, "plan", *MEASURED, *worse)["days"]["closed_form"] > usual, worse


def test_choices_as_csv(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "choices.csv"
    run_json(capsys, "plan", *MEASURED, "--spares", "2", "-o", str(file))
    rows = list(csv.DictReader(file.read_text().splitlines()))
    assert {row["spares"] for row in rows} == {"0", "1", "2", "4", "8", "16"}
    assert all(0 < float(row["goodput"]) <= 1 for row in rows)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--gpus", "1", "--step-s", "2", "--steps", "9", "--mtbf", "gpu=1s", "--checkpoint-size", "1GB"),
         "makes no progress: it is interrupted every 1 s"),
        (("--gpus", "8", "--step-s", "2", "--steps", "9"), "use --checkpoint-size, such as 1TB"),
        (("--gpus", "8", "--step-s", "2", "--tokens", "1T", "--failures", "none"), "needs --global-batch and --seq"),
        (SMALL, "one of --tokens 15T, --samples 50k, --steps 100000 or --until"),
        ((*SMALL, "--tokens", "1T", "--steps", "5"), "--tokens and --steps both say"),
        ((*SMALL, "--tokens", "-1"), "'-1' is not a count"),
        ((*SMALL, "--tokens", "1Z"), "'1Z' is not a count"),
        ((*SMALL, "--tokens", "1T", "--failures", "lama-3"), "did you mean llama-3"),
        ((*SMALL, "--tokens", "1T", "--mtbf", "gpu"), "expected gpu=..., node=..., link=..."),
        ((*SMALL, "--tokens", "1T", "--mtbf", "gpu=0h"), "above zero"),
        ((*SMALL, "--tokens", "1T", "--repair", "share=2"), "from 0 to 1"),
        ((*SMALL, "--tokens", "1T", "--shrink"), "use --spares 0 or more"),
        ((*MEASURED, "--spares", "0", "--shrink"), "needs the number of replicas of the measured run: use --dp"),
        ((*MEASURED, "--allow-oom"), "memory is not checked with --step-s"),
        ((*MEASURED, "--currency", "EUR"), "use --price as well"),
        ((*MEASURED, "--price", "2.5eur"), "--currency EUR"),
        ((*SMALL, "--tokens", "1T", "--evaluate", "every=5"), "for=... is missing"),
        ((*SMALL, "--stage", "seq=4096"), "give the tokens or the steps of the stage"),
        ((*SMALL, "--stage", "tokens"), "expected KEY=VALUE"),
        ((*SMALL, "--until", "2020-01-01", "--from", "2026-01-01"), "is not after the first day"),
        ((*SMALL, "--until", "soon"), "expected a date"),
        ((*SMALL, "--until", "2099-01-01", "--tokens", "1T"), "leave one of them out, or --gpus to find the fewest"),
        ((*SMALL, "--tokens", "1T", "--pue", "0.5"), "from 1 to 10"),
        ((*SMALL, "--tokens", "1T", "--node-write", "5"), "has no unit"),
        ((*SMALL, "--tokens", "1T", "--checkpoint-every", "0s"), "above zero"),
    ],
)  # fmt: skip
def test_mistakes_are_one_clear_line(capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], said: str) -> None:
    status, printed, complaint = run(capsys, "plan", *arguments)
    assert status == 2
    assert not printed
    assert said in complaint
    assert complaint.count("\n") == 1


def test_without_a_model_and_a_step(capsys: pytest.CaptureFixture[str]) -> None:
    status, _, complaint = run(capsys, "plan", "--gpus", "8", "--steps", "5")
    assert status == 2
    assert "use --model and --cluster, or --step-s" in complaint


def test_failure_profiles_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    found = run_json(capsys, "list", "failures")["failures"]
    assert {"llama-3", "meta-rsc-1", "opt-175b", "bloom", "megascale"} <= {each["failures"] for each in found}


def test_a_date_and_tokens_find_the_fewest_gpus(capsys: pytest.CaptureFixture[str]) -> None:
    step = "plan llama-3.1-8b --cluster dgx-h100 --seq 4096 --tokens 1T --runs 20"
    sized = run_json(capsys, *step.split(), "--from", "2027-01-01", "--until", "2027-02-01")
    gpus = sized["phases"][0]["gpus"]
    assert gpus % 8 == 0
    assert sized["days"]["closed_form"] <= 31
    assert f"{gpus:,} GPUs finish 1T tokens by 2027-02-01" in sized["assumptions"][0]
    assert run_json(capsys, *step.split(), "--gpus", str(gpus))["days"] == sized["days"]
    assert run_json(capsys, *step.split(), "--gpus", str(gpus - 8))["days"]["closed_form"] > 31


@pytest.mark.parametrize(
    ("words", "fewest", "fewer"),
    [
        # 32 replicas do not divide a batch of 2,000; 40 do, on ten complete nodes.
        ("llama-3.1-8b --seq 8192 --tp 2 --global-batch 2000", 80, 40),
        # Replicas come in groups of 8 that share the experts, or of 4 that share a copy of the states.
        ("mixtral-8x7b --seq 4096 --ep 8", None, None),
        ("llama-3.1-8b --seq 4096 --framework torchtitan --sharding hybrid-fsdp --shard 4", None, None),
    ],
)
def test_a_date_counts_the_replicas_that_are_possible(
    words: str, fewest: int | None, fewer: int | None, capsys: pytest.CaptureFixture[str]
) -> None:
    dates = ("--from", "2027-01-01", "--until", "2027-01-22", "--runs", "20")
    sized = run_json(capsys, "plan", *words.split(), "--cluster", "dgx-h100", "--tokens", "1T", *dates)
    assert sized["days"]["closed_form"] <= 21
    if fewest:
        assert sized["phases"][0]["gpus"] == fewest
        assert sized["assumptions"][0].endswith(f"; {fewer} do not (--gpus)")


def test_a_date_that_no_cluster_can_keep_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    words = "plan llama-3.1-8b --gpu h100-sxm --tokens 100T --from 2027-01-01 --until 2027-01-03"
    status, _, problem = run(capsys, *words.split())
    assert status == 2
    assert "no number of GPUs finishes by 2027-01-03" in problem


def test_owned_hardware_carbon_spot_and_restarts(capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "plan",
        "llama-3.1-70b",
        "--cluster",
        "dgx-h100",
        "--gpus",
        "1024",
        "--tp",
        "8",
        "--tokens",
        "1T",
        "--runs",
        "20",
    ]
    usual = run_json(capsys, *words)
    owned = run_json(capsys, *words, "--buy", "gpu=35064,years=4,electricity=0.1", "--carbon", "norway")
    assert owned["cost"] == pytest.approx(owned["gpu_hours"] + 100 * owned["energy_mwh"])
    assert owned["carbon_t"] == pytest.approx(0.03 * owned["energy_mwh"])
    spot = run_json(capsys, *words, "--spot", "50%")
    # Half of 128 nodes are gone after 30.44 days at a constant rate.
    more = 128 * 0.6931 / (30.44 * 86400)
    rates = [1 / each["phases"][0]["between_interruptions_s"] for each in (usual, spot)]
    assert rates[1] - rates[0] == pytest.approx(more, rel=1e-3)
    in_job, in_process = (run_json(capsys, *words, "--restart", mode) for mode in ("in-job", "in-process"))
    assert in_process["goodput"] > in_job["goodput"] > usual["goodput"]
    assert run(capsys, *words, "--carbon", "mars")[0] == 2
    assert run(capsys, *words, "--buy", "gpu=1", "--price", "2")[0] == 2


def test_gpu_hours_say_that_they_include_spares(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "llama-3.1-8b", "--cluster", "dgx-h100", "--gpus", "64", "--tokens", "100B", "--runs", "20"]
    hours = [
        next(line for line in run(capsys, *words, *spares)[1].splitlines() if line.startswith("GPU-hours"))
        for spares in ([], ["--spares", "1"], ["--spares", "2"])
    ]
    notes = [line.partition(",")[2].partition(",")[2] for line in hours]
    assert notes == ["", " with 1 spare node", " with 2 spare nodes"]
