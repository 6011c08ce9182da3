"""``stepcast sweep`` from outside."""

import csv
import io
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from stepcast.cli.main import main
from stepcast.questions.choices import spell_choices
from stepcast.sweep.spec import read_spec
from tests.cli.test_main import EXAMPLES, run, run_json
from tests.shared import ROOT

SPEC = str(EXAMPLES / "sweeps" / "small.toml")
POINTS = 36


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = str(tmp_path_factory.mktemp("sweep") / "answers")
    line = [sys.executable, "-m", "stepcast", "sweep", SPEC, "-o", folder, "--json", "--workers", "2"]
    found = json.loads(subprocess.run(line, capture_output=True, check=True, cwd=ROOT).stdout)
    assert (found["points"], found["answered"], found["errors"], found["new"]) == (POINTS, POINTS, 0, POINTS)
    return folder


def test_every_row_is_what_its_command_predicts(answers: str, capsys: pytest.CaptureFixture[str]) -> None:
    spec = read_spec(Path(SPEC).read_text())
    rows = run_json(capsys, "sweep", "show", answers, "--top", "100")["rows"]
    assert len(rows) == POINTS
    for row in rows[::6]:
        words = ["predict", *spell_choices(spec.point(row["position"]))]
        predicted = run_json(capsys, *words)
        assert predicted["step_s"] == row["step_s"]
        assert predicted["mfu"] == row["mfu"]
        assert predicted["training"]["cost"] == row["cost"]
        assert predicted["memory_bytes"]["total"] == row["memory_bytes"]
        assert predicted["memory_bytes"]["fits"] == bool(row["fits"])


def test_the_same_command_asks_nothing_again(answers: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_json(capsys, "sweep", SPEC, "-o", answers)["new"] == 0


def test_rows_are_shown_filtered_and_sorted(answers: str, capsys: pytest.CaptureFixture[str]) -> None:
    rows = run_json(capsys, "sweep", "show", answers, "--where", "fits AND gpus = 32", "--sort", "mfu", "--reverse")[
        "rows"
    ]
    assert rows
    assert all(row["fits"] and row["gpus"] == 32 for row in rows)
    assert [row["mfu"] for row in rows] == sorted((row["mfu"] for row in rows), reverse=True)
    code, out, _ = run(capsys, "sweep", "show", answers, "--top", "3")
    assert code == 0
    assert "3 of 36 answered points" in out
    assert "tokens/s/GPU" in out


@pytest.mark.parametrize("width", ["80", "100", "120"])
def test_rows_fit_the_terminal(
    answers: str, width: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", width)
    _, out, _ = run(capsys, "sweep", "show", answers, "--top", "100")
    assert max(map(len, out.splitlines())) <= int(width)
    assert "fits" in run(capsys, "sweep", "show", answers, "--top", "2")[1].partition("Rows")[0]


@pytest.mark.parametrize("kind", ["csv", "json"])
def test_exported_rows_are_those_shown(
    answers: str, kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = tmp_path / f"rows.{kind}"
    assert run(capsys, "sweep", "export", answers, "--to-file", str(name))[0] == 0
    rows = json.loads(name.read_text()) if kind == "json" else list(csv.DictReader(io.StringIO(name.read_text())))
    shown = run_json(capsys, "sweep", "show", answers, "--sort", "position", "--top", "100")["rows"]
    assert [float(row["step_s"]) for row in rows] == [row["step_s"] for row in shown]


def test_what_cannot_be_predicted_is_a_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spec = tmp_path / "spec.toml"
    spec.write_text('[fixed]\nmodel = "llama-3.2-1b"\ncluster = "dgx-h100"\ngpus = 8\n[[axis]]\ntp = [1, 3, "two"]')
    status, out, _ = run(capsys, "sweep", str(spec), "-o", str(tmp_path / "answers"), "--workers", "1", "--json")
    found = json.loads(out)
    assert (status, found["answered"], found["errors"]) == (1, 3, 2)
    rows = run_json(capsys, "sweep", "show", str(tmp_path / "answers"), "--where", "error IS NOT NULL")["rows"]
    assert [row["tp"] for row in rows] == [3, "two"]
    assert "divide" in rows[0]["error"] or "multiple" in rows[0]["error"]
    assert "whole number" in rows[1]["error"]
    _, out, _ = run(capsys, "sweep", str(spec), "-o", str(tmp_path / "answers"), "--workers", "1")
    assert "whole number" in out


def test_the_best_of_a_search_for_each_point(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spec = tmp_path / "spec.toml"
    spec.write_text(
        'ask = "search"\n[fixed]\nmodel = "llama-3.2-1b"\ncluster = "dgx-h100"\nglobal-batch = 16\n'
        'fix = ["sharding=zero-1", "cp=1", "recompute=none", "schedule=1f1b"]\n'
        'allow = ["micro-batch=1,2", "pp=1,2"]\n[[axis]]\ngpus = [8, 16]'
    )
    folder = str(tmp_path / "answers")
    assert run_json(capsys, "sweep", str(spec), "-o", folder, "--workers", "1")["errors"] == 0
    for row in run_json(capsys, "sweep", "show", folder)["rows"]:
        assert run_json(capsys, *shlex.split(row["found"])[1:])["step_s"] == row["step_s"]


def test_whole_runs_of_each_point(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spec = tmp_path / "spec.toml"
    spec.write_text(
        'ask = "plan"\n[fixed]\nmodel = "llama-3.2-1b"\ncluster = "dgx-h100"\ntokens = "1T"\nruns = 20\n'
        "[[axis]]\ngpus = [8, 16]\n[[axis]]\nseed = [1, 2]"
    )
    folder = str(tmp_path / "answers")
    assert run_json(capsys, "sweep", str(spec), "-o", folder, "--workers", "1")["errors"] == 0
    words = "--model llama-3.2-1b --cluster dgx-h100 --tokens 1T --runs 20"
    for row in run_json(capsys, "sweep", "show", folder)["rows"]:
        told = run_json(capsys, "plan", *words.split(), "--gpus", str(row["gpus"]), "--seed", str(row["seed"]))
        assert (row["days"], row["goodput"]) == (told["days"]["mean"], told["goodput"])


def test_the_page_of_plans_shows_days_cost_and_what_fits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An 8B model with fp32 states on each of 8 GPUs fits at tp 8, not at tp 1 without sharding."""
    spec, page, folder = tmp_path / "spec.toml", tmp_path / "page.html", str(tmp_path / "answers")
    spec.write_text(
        'ask = "plan"\n[fixed]\nmodel = "llama-3.1-8b"\ncluster = "dgx-h100"\ngpus = 8\ntokens = "1T"\n'
        'runs = 20\nprice = 2\ncurrency = "EUR"\nsharding = "none"\n[[axis]]\ntp = [1, 4, 8]'
    )
    found = run_json(capsys, "sweep", str(spec), "-o", folder, "--workers", "1", "--html", str(page))
    assert found["errors"] == 0
    rows = run_json(capsys, "sweep", "show", folder, "--sort", "tp")["rows"]
    assert [row["fits"] for row in rows] == [0, 1, 1]
    assert all(row["memory_bytes"] > 0 and 0 < row["mfu"] < 1 for row in rows)
    for row in rows:
        assert row["cost"] == pytest.approx(2 * row["gpu_hours"])
        assert row["tokens_per_s_per_gpu"] == pytest.approx(1e12 / row["days"] / row["goodput"] / 86400 / 8, rel=1e-5)
    text = page.read_text()
    assert "Nothing" not in text
    fitting = rows[1:]
    assert f"{min(row['days'] for row in fitting):,.1f} days" in text
    assert all(f"{row['cost']:,.0f} EUR" in text for row in fitting)
    assert f"{rows[0]['cost']:,.0f} EUR" not in text
    assert " EUR" in run(capsys, "sweep", "show", folder)[1]


def test_a_search_that_is_out_of_time_is_not_one_that_finds_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec, page, folder = tmp_path / "spec.toml", tmp_path / "page.html", str(tmp_path / "answers")
    spec.write_text(
        'ask = "search"\n[fixed]\nmodel = "llama-3.1-8b"\ncluster = "dgx-h100"\nglobal-batch = 64\n'
        'seq = 4096\ntime = "1ms"\n[[axis]]\ngpus = [8, 16]'
    )
    found = run_json(capsys, "sweep", str(spec), "-o", folder, "--workers", "1", "--html", str(page))
    assert found["errors"] == 0
    rows = run_json(capsys, "sweep", "show", folder)["rows"]
    assert [row["state"] for row in rows] == ["out of time"] * 2
    assert all(row["error"] is None for row in rows)
    status = run_json(capsys, "sweep", "status", folder)
    assert status["out_of_time"] == 2
    text = page.read_text()
    assert "out of time" in text.lower()
    assert "nothing fits" not in text.lower()


def test_a_breakdown_is_told_where_it_is_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spec = tmp_path / "spec.toml"
    spec.write_text('[fixed]\nmodel = "llama-3.2-1b"\ncluster = "dgx-h100"\ngpus = 8\nbreakdown = true\npp = 2')
    run_json(capsys, "sweep", str(spec), "-o", str(tmp_path / "answers"), "--workers", "1")
    row = run_json(capsys, "sweep", "show", str(tmp_path / "answers"))["rows"][0]
    told = run_json(
        capsys, *["predict", "--model", "llama-3.2-1b", "--cluster", "dgx-h100", "--gpus", "8", "--pp", "2"]
    )
    assert row["bubble"] == told["breakdown_s"]["bubble"] / told["step_s"]
    assert (row["low_s"], row["high_s"]) == (told["uncertainty"]["low_s"], told["uncertainty"]["high_s"])


def test_intervals_are_those_of_predict(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Hosts of eager steps and cost estimates of unmeasured GPUs widen them."""
    spec, asked = tmp_path / "spec.toml", [("dgx-h100", "pytorch"), ("mi300x-node", "megatron-core")]
    clusters, frameworks = zip(*asked, strict=True)
    spec.write_text(
        f'[fixed]\nmodel = "llama-3.2-1b"\ngpus = 8\n[[axis]]\ncluster = {list(clusters)}\nframework = {list(frameworks)}'
    )
    run_json(capsys, "sweep", str(spec), "-o", str(tmp_path / "answers"), "--workers", "1")
    rows = {row["cluster"]: row for row in run_json(capsys, "sweep", "show", str(tmp_path / "answers"))["rows"]}
    for cluster, framework in asked:
        words = ["llama-3.2-1b", "--cluster", cluster, "--gpus", "8", "--framework", framework]
        wanted = run_json(capsys, "predict", *words)["uncertainty"]
        assert [rows[cluster][name] for name in ("low_s", "high_s")] == [wanted[name] for name in ("low_s", "high_s")]


def test_ctrl_c_keeps_what_was_answered(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "answers"
    line = [sys.executable, "-m", "stepcast", "sweep", SPEC, "-o", str(folder), "--workers", "1"]
    driver = subprocess.Popen(line, cwd=ROOT, stderr=subprocess.PIPE, text=True, preexec_fn=_interruptible)
    while driver.poll() is None:
        time.sleep(0.2)
        if (folder / "results.sqlite").exists() and _answered(folder):
            driver.send_signal(signal.SIGINT)
            break
    _, said = driver.communicate()
    if driver.returncode == -signal.SIGINT:  # Python was ending, and no longer handles signals
        assert _answered(folder) == POINTS
    elif driver.returncode != 0:  # it may have been faster
        assert driver.returncode == 130
        # After the last answer there is nothing to resume.
        assert "answers are saved; the same command resumes the sweep" in said or _answered(folder) == POINTS
        assert "Traceback" not in said
    found = run_json(capsys, "sweep", SPEC, "-o", str(folder), "--workers", "1")
    assert found["answered"] == POINTS


def _interruptible() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _answered(folder: Path) -> int:
    from stepcast.sweep.store import Store

    try:
        with Store(str(folder)) as store:
            return store.counts()["answered"]
    except ValueError:
        return 0


BAD = {
    ("sweep", SPEC): "use -o DIR",
    ("sweep", "status"): "needs the folder of a sweep",
    ("sweep", "status", "{folder}"): "has no sweep",
    ("sweep", "{folder}/none.toml", "-o", "{folder}/x"): "none.toml",
    ("sweep", SPEC, "{folder}"): "unexpected argument",
    ("sweep", SPEC, "-o", "{folder}/x", "--where", "1"): "--where has no effect",
    ("sweep", "show", "{folder}", "--workers", "2"): "--workers has no effect",
    ("sweep", "export", "{folder}"): "export needs --to",
    ("sweep", "export", "{folder}", "--to-file", "{folder}/rows.xls"): "ends in .csv, .parquet or .json",
    ("sweep", SPEC, "-o", "{folder}/x", "--engine", "mesos"): "unrecognised value",
    ("sweep", SPEC, "-o", "{folder}/x", "--workers", "0"): "whole number",
}


@pytest.mark.parametrize("words", BAD, ids=" ".join)
def test_what_is_wrong_is_one_line(words: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, said = run(capsys, *(word.format(folder=tmp_path) for word in words))
    assert code == 2
    assert said.count("\n") == 1
    assert BAD[words] in said


@pytest.mark.parametrize(
    ("word", "said"),
    [("tpp = 1", "did you mean tp?"), ("json = true", "is no option"), ('trace = "x"', "is no option")],
)
def test_words_that_no_point_can_have(word: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spec = tmp_path / "spec.toml"
    spec.write_text(f"[fixed]\n{word}")
    code, _, told = run(capsys, "sweep", str(spec), "-o", str(tmp_path / "x"))
    assert code == 2
    assert said in told
    assert not os.path.exists(tmp_path / "x")


def test_points_are_counted_before_they_are_asked(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_json(capsys, "sweep", SPEC, "--dry-run") == {"points": POINTS, "of": 48}
    assert main(["sweep", SPEC, "--dry-run", "--engine", "ray", "--address", "127.0.0.1:9"]) == 2
    assert "--address has no effect with --dry-run" in capsys.readouterr().err


MANY = """
[fixed]
model = "llama-3.2-1b"
cluster = "dgx-h100"
gpus = 8
global-batch = 8
[[axis]]
seq = "1..1024"
"""
WIDE = MANY + "".join(f"[[axis]]\n{name} = {[*range(1, 101)]}\n" for name in ("tp", "pp", "micro-batch"))


def test_very_many_points_are_refused_with_what_they_would_take(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "wide.toml").write_text(WIDE.replace("1..1024", "64..512"))
    line = ["sweep", str(tmp_path / "wide.toml"), "-o", str(tmp_path / "out"), "--workers", "1"]
    code, _, said = run(capsys, *line)
    assert code == 2
    took = r"take about .+ each in a trial, [\d.,]+ days with 1 workers"
    assert re.fullmatch(rf"stepcast: 4,000,000 points {took}; --limit N .*, and --limit 4000000 all\n", said)
    assert not (tmp_path / "out").exists()
    found = json.loads(run(capsys, *line, "--limit", "40", "--json")[1])
    assert (found["points"], found["answered"]) == (40, 40)


def test_a_limit_spreads_points_over_all_of_them() -> None:
    spec = read_spec(MANY)
    every, some = [at for at, _ in spec.points()], [at for at, _ in spec.points(3)]
    assert len(every) == 11
    assert len(some) == 3
    assert set(some) <= {at for at, _ in spec.points(5)}
    assert [at for at, _ in spec.points(99)] == every


def test_mistakes_in_a_specification_name_its_file(
    answers: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for change, message in (
        ('where = "tp > 100"', "leaves no point"),
        ('where = "pt > 1"', "no point has 'pt'"),
        ('fixed.sequ = 1', "'sequ' is no option"),
    ):  # fmt: skip
        spec = tmp_path / "spec.toml"
        spec.write_text(change + "\n[[axis]]\ntp = [1, 2]\n")
        assert main(["sweep", str(spec), "-o", str(tmp_path / "new")]) == 2
        error = capsys.readouterr().err
        assert f"{spec}: " in error
        assert message in error
    for words in (["sweep", answers], ["show", answers]):
        assert main(words) == 2
        assert "stepcast sweep show" in capsys.readouterr().err
