"""A log that grows: drift, stragglers, slow links and recovery are named, and logs of every program have steps."""

import json
import threading
import time
from pathlib import Path

import pytest

import stepcast
from stepcast.analyze.watch import StepWatch, WatchedStep
from stepcast.cli.main import main
from stepcast.inputs.source import Source
from stepcast.inputs.step_logs import StepLines
from stepcast.inputs.table import read, recognise
from stepcast.ir.measured import LoggedStep, StepLog
from tests.shared import ROOT

pytestmark = pytest.mark.slow

TIMERS = ROOT / "examples" / "watch" / "megatron-timers.log"
NEMO = "".join(
    f"0: Training epoch 0, iteration {step}/99 | lr: 5.6e-06 | global_batch_size: 32 | global_step: {step} | max_memory_allocated: 62777982976 "
    f"| reduced_train_loss: 2.778 | train_step_timing in s: {1.25 + step / 1000} | TFLOPS_per_GPU: 865.7 | consumed_samples: 928\n"
    for step in range(8)
)
DEEPSPEED = "".join(
    f"[2023-11-07 01:55:{second:02d},711] [INFO] [logging.py:96:log_dist] [Rank 0] step={step}, skipped=4, lr=[4.9e-05], mom=[(0.9, 0.95)]\n"
    f"[2023-11-07 01:55:{second:02d},714] [INFO] [timer.py:260:stop] epoch=0/micro_step={4 * step}/global_step={step}, "
    "RunningAvgSamplesPerSec=25.0, CurrSamplesPerSec=25.7, MemAllocated=4.32GB, MaxMemAllocated=38.5GB\n"
    for step, second in ((10, 3), (20, 18), (30, 33), (40, 48))
)
TRAINER = "".join(
    f"\r  {step}%|▌         | {step}/250 [00:31<10:20,  2.6{step}s/it]{{'loss': 1.2, 'grad_norm': 0.4, 'epoch': 0.1}}\n"
    for step in range(1, 8)
)


@pytest.mark.parametrize(
    ("text", "name", "step_s", "peak"),
    [
        (NEMO, "nemo-log", 1.2535, 62777982976),
        (DEEPSPEED, "deepspeed-log", 1.5, 38.5 * 2**30),
        (TRAINER, "trainer-log", 2.64, None),
    ],
)
def test_logs_of_other_programs(tmp_path: Path, text: str, name: str, step_s: float, peak: float | None) -> None:
    path = tmp_path / "log"
    path.write_text(text)
    assert recognise(Source(path)).name == name
    log: StepLog = read(path)
    times = sorted(step.seconds for step in log.steps if step.seconds)
    assert (times[(len(times) - 1) // 2] + times[len(times) // 2]) / 2 == pytest.approx(step_s)
    assert log.peak_bytes == peak


def test_given_steps_count_where_the_log_states_others(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["watch", str(TIMERS), "--once", "--json", "--steps", "200"]) == 0
    events = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert events[-1]["total_steps"] == 200
    last = [event for event in events if event["event"] == "step"][-1]
    assert last["finish_s"] == pytest.approx((200 - last["step"]) * last["recent_s"])


@pytest.mark.parametrize("line", ["2023-99-99 99:99:99 global_step=1, RunningAvgSamplesPerSec=x, CurrSamplesPerSec=y", "times across ranks (ms):", "     rank 1: 2", "iteration 9/9 | elapsed time per iteration (ms): nan |", ":::MLLOG {", "\x00"])  # fmt: skip
def test_odd_lines_are_taken(line: str) -> None:
    lines = StepLines()
    assert all(isinstance(event, LoggedStep) for event in lines.feed(line))


def test_a_log_replayed_at_100_times_its_speed_names_the_straggler_and_the_link(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "train.log"
    log.touch()
    blocks = TIMERS.read_text().replace(" [2026", "\0 [2026").split("\0")

    def write() -> None:
        with log.open("a") as file:
            for block in blocks:
                file.write(block)
                file.flush()
                time.sleep(0.01)  # a step takes a second

    writer = threading.Thread(target=write)
    writer.start()
    assert main(["watch", str(log), "--idle", "0.6", "--json"]) == 0
    writer.join()
    events = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    alerts = {event["kind"]: event for event in events if event["event"] == "alert"}
    assert set(alerts) == {"drift", "straggler", "slow link"}
    assert (alerts["straggler"]["rank"], alerts["slow link"]["part"]) == (5, "all-grads-sync")
    assert 60 <= alerts["straggler"]["step"] <= 65
    assert 90 <= alerts["slow link"]["step"] <= 95
    assert events[-1]["event"] == "summary"
    assert events[-1]["last_step"] == 120


def test_recovery_forecast_and_finish(tmp_path: Path) -> None:
    log, forecast = tmp_path / "log", tmp_path / "forecast.json"
    forecast.write_text(json.dumps({"step_s": 1.0, "uncertainty": {"low_s": 0.9, "high_s": 1.1}}))
    times = [1.0] * 30 + [1.2] * 20 + [1.0] * 20
    log.write_text(
        "".join(
            f"iteration {step}/ 100 | elapsed time per iteration (ms): {1000 * seconds} |\n"
            for step, seconds in enumerate(times, 1)
        )
    )
    events = [*stepcast.watch(log, forecast, idle_s=0)]
    kinds = [event.kind for event in events if isinstance(event, stepcast.WatchAlert)]
    assert kinds == ["drift", "forecast", "recovered", "recovered"]
    last = events[-1]
    assert isinstance(last, stepcast.WatchedStep)
    assert last.finish_s == pytest.approx(30.0)


def test_a_forecast_of_another_batch_is_named() -> None:
    watch = StepWatch({"step_s": 1.0, "run": {"global_batch": 256}})
    events = [event for step in range(1, 9) for event in watch.add(LoggedStep(step, 0.5, samples=64))]
    (alert,) = (event for event in events if not isinstance(event, WatchedStep))
    assert alert.kind == "forecast"
    assert "256" in alert.text
    assert "64" in alert.text
    same = StepWatch({"step_s": 1.0, "run": {"global_batch": 64}})
    assert all(
        isinstance(event, WatchedStep) for step in range(1, 9) for event in same.add(LoggedStep(step, 0.5, samples=64))
    )


def test_page_and_mistakes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.html"
    assert main(["watch", str(TIMERS), "--once", "--html", str(page)]) == 0
    assert "rank 5 computes 1.25 times" in page.read_text()
    capsys.readouterr()
    assert main(["watch", str(tmp_path / "none")]) == 2
    assert "no such file" in capsys.readouterr().err
    assert main(["watch", str(TIMERS), "--once", "--forecast", str(TIMERS)]) == 2
    assert "is no forecast" in capsys.readouterr().err


def test_a_file_without_steps_is_not_called_normal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "notes.txt").write_text("nothing that a program logs\n")
    assert main(["watch", str(tmp_path / "notes.txt"), "--once"]) == 0
    shown = capsys.readouterr().out
    assert "no steps" in shown
    assert "normal" not in shown


def test_the_finish_counts_pauses() -> None:
    """Steps of 2 s with a checkpoint of 10 s every 25 steps: of 500 steps 447 and 18 checkpoints are left at step 53."""
    watch = StepWatch()
    finish_s: dict[int, float | None] = {}
    for step in range(1, 101):
        events = watch.add(LoggedStep(step, 12.0 if step % 25 == 0 else 2.0), 500)
        finish_s |= {event.step: event.finish_s for event in events if isinstance(event, WatchedStep)}
    assert finish_s[53] == pytest.approx(447 * 2 + 18 * 10, rel=0.01)
    assert watch.alerts == []


def test_drift_at_its_limit_is_reported_once() -> None:
    """Steps become 3 % longer, give or take two thousandths."""
    watch = StepWatch()
    for step in range(1, 201):
        noise = (0.004, -0.004, 0.0)[step // 7 % 3]
        list(watch.add(LoggedStep(step, 2.0 * (1 + (0.03 + noise) * (step > 100))), 500))
    assert [alert.kind for alert in watch.alerts] == ["drift"]
