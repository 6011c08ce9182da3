"""The verbs analyze, replay and compare from outside."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from stepcast.cli.main import main
from tests.analyze.megatron_run import Pipeline, step_ms, write
from tests.shared import ROOT

RUN = Pipeline(slow={5: 2.0})


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    write(RUN, folder)
    return folder


def printed(capsys: pytest.CaptureFixture[str], *words: object) -> dict[str, Any]:
    assert main([*map(str, words), "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_analyze_prints_the_promised_keys(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = printed(capsys, "analyze", run)
    for key in ("step_s", "operations_s", "bubble_s", "exposed_comm_s", "critical_path", "warnings"):
        assert key in found
    assert found["stragglers"][0]["rank"] == 5
    assert found["stragglers"][0]["factor"] == pytest.approx(2.0, rel=0.01)


def test_analyze_says_it_in_words(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The verdict comes first: step, bottleneck, straggler and what it costs, worked out by hand."""
    assert main(["analyze", str(run)]) == 0
    text = capsys.readouterr().out
    step, bottleneck, straggler = text.splitlines()[:3]
    assert step.split() == ["step", f"{step_ms(RUN):.2f}", "ms"]
    assert bottleneck.startswith("bottleneck  ")
    assert "pipeline bubble" in bottleneck
    cost = step_ms(RUN) - step_ms(Pipeline())
    costs = f"rank 5 takes 2.00x as long as its peers: costs {cost:.2f} ms, {cost / step_ms(RUN) * 100:.1f} %"
    assert straggler.split(maxsplit=1)[1].startswith(costs)
    assert "rank 5 is slow: 2.00x as long as others for the same work" in text
    assert len(text.splitlines()) < 45
    assert main(["analyze", str(run), "--verbose"]) == 0
    detailed = capsys.readouterr().out
    assert set(text.splitlines()) - set(detailed.splitlines()) == {text.splitlines()[-1]}
    for title in ("operation  ", "communication  ", "stage  layers", "critical path: "):
        assert any(line.startswith(title) for line in detailed.splitlines())
        assert not any(line.startswith(title) for line in text.splitlines())


def test_stragglers_cost_nothing_where_there_are_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(Pipeline(), tmp_path)
    assert printed(capsys, "analyze", tmp_path)["straggler_cost_s"] == 0
    assert main(["analyze", str(tmp_path)]) == 0
    assert any(line.split() == ["straggler", "none"] for line in capsys.readouterr().out.splitlines()[:4])


def test_verbose_is_noted_where_nothing_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["analyze", str(ROOT / "examples" / "optimus-llama-1b.txt"), "--verbose"]) == 0
    assert "--verbose has no effect" in capsys.readouterr().err


def test_analyze_compares_bandwidth_with_a_cluster(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = printed(capsys, "analyze", run, "--cluster", "dgx-a100")
    (row,) = [
        row for row in found["communication"] if row["name"] == "linear_fwd" and row["operation"] == "forward_step"
    ]
    assert row["cluster_busbw_bytes_per_s"] > row["busbw_bytes_per_s"] > 0


def test_analyze_writes_a_trace(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "trace.json"
    printed(capsys, "analyze", run, "--trace", path)
    events = json.loads(path.read_text())["traceEvents"]
    assert any(event["name"].startswith("wait: ") for event in events)


def test_analyze_refuses_what_was_not_measured(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["analyze", str(ROOT / "examples" / "simai-gpt-13b.txt")]) == 2
    assert "but analyze needs the files of a measured run; 'stepcast simulate' simulates it" in capsys.readouterr().err


def test_replay_prints_before_and_after(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = printed(capsys, "replay", run, "--what-if", "rank.5=healthy", "--what-if", "micro-batches=8")
    assert found["measured_step_s"] * 1e3 == pytest.approx(step_ms(RUN), abs=0.01)
    assert abs(found["error"]) < 1e-4
    expected = step_ms(Pipeline(micro_batches=8))
    assert found["step_s"] * 1e3 == pytest.approx(expected, rel=5e-3)
    assert sum(found["breakdown_s"].values()) == pytest.approx(found["step_s"], rel=1e-3)
    assert found["before"]["step_s"] == found["replayed_step_s"]
    assert main(["replay", str(run), "--what-if", "rank.5=healthy"]) == 0
    text = capsys.readouterr().out
    assert "time breakdown (mean over ranks)" in text
    assert "- rank 5 works at the pace" in text


def test_replay_shares_the_links_of_a_cluster(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Where they have room it is the same; with hardly any, meetings take longer."""
    usual = printed(capsys, "replay", run)
    wide = printed(capsys, "replay", run, "--cluster", "dgx-a100", "--engine", "fluid")
    assert wide["step_s"] == usual["step_s"]
    assert any("engine fluid" in text for text in wide["assumptions"])
    small = ("node.gpus=2", "node.nics=2", "network.leaf_nodes=1", "network.oversubscription=10000")
    narrow = [word for change in small for word in ("--set", change)]
    slow = printed(capsys, "replay", run, "--cluster", "dgx-a100", "--engine", "fluid", *narrow)
    assert slow["step_s"] > usual["step_s"]
    assert main(["replay", str(run), "--engine", "fluid"]) == 2
    assert "use --cluster as well" in capsys.readouterr().err


def test_replay_grows_a_run(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = printed(capsys, "replay", run, "--scale-to", "dp=8", "--cluster", "dgx-a100")
    assert (found["dp"], found["tp"], found["pp"]) == (8, 2, 3)
    assert found["step_s"] > found["replayed_step_s"]
    assert main(["replay", str(run), "--scale-to", "tp=8"]) == 2
    assert "write dp=64" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "work", "gpus", "layers"),
    [
        ("micro-batches=16", 4.0, 1, 6),
        ("dp=2", 2.0, 2, 6),
        ("stage.1.layers=-1", 1.0, 1, 5),
        ("compute=0.5x", 1.0, 1, 6),
    ],
)
def test_replay_compares_work_per_second(
    change: str, work: float, gpus: int, layers: int, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["replay", str(run), "--what-if", change, "--cluster", "dgx-a100"][: None if gpus > 1 else 4]
    found = printed(capsys, *words)
    ratio = found["replayed_step_s"] / found["step_s"]
    assert found["work_factor"] == work
    assert found["step_factor"] == pytest.approx(1 / ratio)
    assert found["speedup"] == pytest.approx(work * ratio)
    assert found["speedup_per_gpu"] == pytest.approx(work * ratio / gpus)
    rates = found["sequences_per_s"]
    assert rates["before"] == pytest.approx(4 / found["replayed_step_s"])  # micro-batches of one sequence
    assert rates["after"] / rates["before"] == pytest.approx(found["speedup"])
    assert found["layers"] == {"before": 6, "after": layers}
    assert main(words) == 0
    text = capsys.readouterr().out
    assert ("x as fast" in text) == (work == 1)
    assert (f"for {work:g}x the sequences" in text) == ("\nthroughput" in text) == (work != 1)
    assert ("; of each GPU" in text) == (gpus > 1)
    assert ("5 layers in place of 6: not the same work" in text) == (layers == 5)


def test_replay_on_another_gpu(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = printed(capsys, "replay", run, "--what-if", "gpu=h100-sxm", "--gpu", "a100-sxm-80gb")
    # Dense tf32 peaks, 156 and 494.7 TFLOP/s.
    assert found["breakdown_s"]["compute"] / found["before"]["breakdown_s"]["compute"] == pytest.approx(
        156 / 494.7, rel=0.01
    )


def test_replay_writes_a_trace(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "trace.json"
    printed(capsys, "replay", run, "--what-if", "bandwidth.tp=2x", "--trace", path)
    assert b'"changed"' in path.read_bytes()
    assert printed(capsys, "show", path)["runs"] == ["measured", "replayed", "changed"]


def test_replay_needs_a_trace(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", str(ROOT / "examples" / "optimus-llama-1b.txt")]) == 2
    assert "replay needs Megatron or Kineto traces" in capsys.readouterr().err


def test_compare_two_runs(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    healthy = tmp_path / "healthy"
    write(Pipeline(), healthy)
    trace = tmp_path / "both.json"
    found = printed(capsys, "compare", healthy, run, "--trace", trace)
    assert found["error"] == pytest.approx(step_ms(Pipeline()) / step_ms(RUN) - 1, rel=1e-3)
    assert {row["stage"] for row in found["stages"]} == {0, 1, 2}
    assert b'"second"' in trace.read_bytes()
    assert found["kinds"] == ["measured", "measured"]
    assert main(["compare", str(healthy), str(run)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert not any("predicted" in line for line in lines)
    assert [line.split()[0] for line in lines if line[:1].strip()][:2] == ["first", "second"]
    saved_ms = step_ms(RUN) - step_ms(Pipeline())
    share = step_ms(Pipeline()) / step_ms(RUN) - 1
    assert f"first - second  -{saved_ms:.2f} ms ({share * 100:+.1f} %)" in lines
    assert any(line.split()[:5] == ["part", "of", "the", "step", "first"] for line in lines)


PREDICT = ["predict", "--model", "llama-3.2-1b", "--cluster", "dgx-h100", "--gpus", "8", "--tp", "2"]


@pytest.mark.parametrize(
    ("more", "differing"),
    [
        ([], []),
        (["--recompute", "full"], []),
        (["--model", "llama-3.1-8b"], ["model", "parameters", "layers", "hidden"]),
        (["--pp", "2"], ["micro_batches", "dp", "pp"]),
        (["--global-batch", "64"], ["micro_batches", "global_batch"]),
        (["--seq", "4096"], ["seq"]),
        (["--precision", "fp8"], ["precision"]),
        (["--cluster", "dgx-a100"], ["cluster"]),
    ],
)
def test_two_predictions_are_compared_without_an_error(
    more: list[str], differing: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = tmp_path / "first.json", tmp_path / "second.json"
    usual = ["--global-batch", "32", "--seq", "2048"]
    first.write_text(json.dumps(printed(capsys, *PREDICT, *usual)))
    second.write_text(json.dumps(printed(capsys, *PREDICT, *usual, *more)))
    status = main(["compare", str(first), str(second), "--json"])
    found = json.loads(capsys.readouterr().out)
    assert [one["name"] for one in found["differences"]] == differing
    assert found["same_run"] is (not differing)
    assert status == 0
    assert found["kinds"] == ["predicted", "predicted"]
    assert (found["error"] is None) == bool(differing)
    assert all((row["error"] is None) >= bool(differing) for row in found["parts"])
    assert main(["compare", str(first), str(second)]) == status
    text = capsys.readouterr().out
    assert "measured" not in text
    assert "error" not in text
    assert ("settings that differ" in text) == bool(differing)


def test_a_prediction_of_another_layout_than_the_measured_run(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also what a replay with more micro-batches printed, against the run as it was."""
    path = tmp_path / "other.json"
    path.write_text(json.dumps(printed(capsys, *PREDICT, "--pp", "2", "--global-batch", "32")))
    assert main(["compare", str(path), str(run)]) == 1
    text = " ".join(capsys.readouterr().out.split())
    assert "predicted step" in text
    assert "measured step" in text
    assert "layers 16 vs 6; hidden 2048 vs 64;" in text
    assert "dp 2 vs 1; pp 2 vs 3; gpus 8 vs 6" in text
    assert main(["compare", str(run), str(path)]) == 1
    assert " ".join(capsys.readouterr().out.split()) == text, "the order of the two does not matter"
    path.write_text(json.dumps(printed(capsys, "replay", run, "--what-if", "micro-batches=8")))
    assert main(["compare", str(path), str(run)]) == 1
    assert "not the same run micro_batches 8 vs 4" in " ".join(capsys.readouterr().out.split())


def test_parts_have_one_name_in_predictions_and_measurements(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each part of an OptimusPrime log is compared with the part of a prediction that it is counted in."""
    path = tmp_path / "predicted.json"
    path.write_text(json.dumps(printed(capsys, *PREDICT, "--pp", "2", "--global-batch", "32")))
    log = str(ROOT / "examples" / "optimus-llama-1b.txt")
    for measured in (str(run), log):
        main(["compare", str(path), measured])
        text = capsys.readouterr().out
        assert re.search(r"\npipeline bubble +[\d.]+ [mu]?s +[\d.]+ [mu]?s", text)
        assert "\ncompute " in text
    assert main(["predict", *PREDICT[1:], "--pp", "2", "--global-batch", "32"]) == 0
    assert "\npipeline bubble " in capsys.readouterr().out
    assert main(["compare", str(path), log, "--json"]) == 1  # of two runs
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)["parts"]}
    assert rows.keys() <= json.loads(path.read_text())["breakdown_s"].keys()
    measured = printed(capsys, "analyze", log)["breakdown_s"]
    assert rows["pp"]["measured_s"] == measured["messages"] > 0
    assert rows["compute"]["measured_s"] == sum(measured[part] for part in ("compute", "unhooked", "accumulation"))
    assert rows["pp"]["predicted_s"] > 0


@pytest.mark.parametrize(
    ("words", "use"),
    [
        (("predict", "simai-gpt-13b.txt"), "'stepcast simulate' simulates it"),
        (("predict", "kineto-llama-1b.json.gz", "--cluster", "dgx-h100"), "'stepcast analyze' explains it"),
        (("compare", "simai-gpt-13b.txt", "megatron-rank7.txt"), "'stepcast simulate' simulates it"),
        (("gate", "simai-gpt-13b.txt", "--save", "x.json"), "'stepcast simulate' simulates it"),
    ],
)
def test_a_file_of_another_kind_is_named_with_its_verb(
    words: tuple[str, ...], use: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT / "examples")
    assert main(list(words)) == 2
    assert use in capsys.readouterr().err


def test_compare_refuses_an_answer_of_several_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    both = tmp_path / "both.json"
    command = [*PREDICT, "--global-batch", "8"]
    command[command.index("--cluster") + 1] = "dgx-h100,dgx-a100"
    both.write_text(json.dumps(printed(capsys, *command)))
    assert main(["compare", str(both), str(both)]) == 2
    assert "states no step of its own" in capsys.readouterr().err


@pytest.mark.parametrize("verb", ["analyze", "replay"])
def test_the_trace_of_a_prediction_is_no_measurement(
    verb: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "trace.json"
    assert main([*PREDICT, "--global-batch", "8", "--trace", str(path)]) == 0
    capsys.readouterr()
    assert main([verb, str(path)]) == 2
    assert "'stepcast compare' takes the --json output" in capsys.readouterr().err
    answer = tmp_path / "answer.json"
    answer.write_text(json.dumps(printed(capsys, *PREDICT, "--global-batch", "8"), indent=2))
    assert main([verb, str(answer)]) == 2
    assert "is the --json output of a verb; 'stepcast compare' and 'stepcast show'" in capsys.readouterr().err


def test_compare_takes_what_a_verb_printed(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", str(run), "--json"]) == 0
    path = tmp_path / "replayed.json"
    path.write_text(capsys.readouterr().out)
    found = printed(capsys, "compare", path, run)
    assert abs(found["error"]) < 1e-4
    path.write_text('{"step_s": 1.0, ')
    assert main(["compare", str(path), str(run)]) == 2
    assert "not complete JSON" in capsys.readouterr().err
