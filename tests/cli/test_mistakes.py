"""Nonsense on the command line gets one line that names the option, and never a traceback or a number."""

import gzip
import os
import threading
from pathlib import Path

import pytest

from stepcast.inputs.table import read
from tests.cli.test_main import EXAMPLES, run, run_json
from tests.shared import ROOT

LLAMA = str(EXAMPLES / "simai-llama-405b.txt")
TABLE = str(EXAMPLES / "optable-gpt2-large.tsv")
SIMULATE = ("simulate", LLAMA, "--cluster", "dgx-h100")
PREDICT = ("predict", "--model", "llama-3.1-8b", "--cluster", "dgx-h100", "--gpus", "64")
EXPERTS = ("predict", "--model", "mixtral-8x7b", "--cluster", "dgx-h100", "--gpus", "64", "--ep", "8")
SEARCH = ("search", *PREDICT[1:], "--global-batch", "64")
COLLECTIVE = ("collective", "all-to-all", "--cluster", "dgx-h100", "--size", "1GiB", "--ranks", "16")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((*SIMULATE, "--gpus", "9" * 40), "--gpus"),
        ((*SIMULATE, "--gpus", "0"), "--gpus"),
        ((*SIMULATE, "--slow-stage", "3=1e300"), "--slow-stage"),
        ((*SIMULATE, "--slow-stage", "\u0663=2"), "--slow-stage"),
        ((*SIMULATE, "--jitter", "0.1", "--seed", "-1"), "--seed"),
        ((*SIMULATE, "--trace", "-"), "--trace"),
        ((*SIMULATE, "--trace", ""), "--trace"),
        (("simulate", TABLE, "--cluster", "dgx-h100", "--repeat-layers", "99999999"), "--repeat-layers"),
        (("show", TABLE, "--backward-factor", "1e308"), "backward factor"),
        ((*PREDICT, "--tp", "0"), "--tp"),
        ((*PREDICT, "--tokens", "-1T"), "'-1T' is not a count"),
        ((*PREDICT, "--lora", "16,abc"), "modules such as q_proj"),
        ((*PREDICT, "--lengths", LLAMA), "simai-llama-405b.txt: not valid JSON"),
        ((*PREDICT, "--lengths", "chats.jsonl"), "there is no such file"),
        ((*PREDICT, "--jitter", "5x"), "such as 5% or 0.05"),
        (("plan", *PREDICT[1:-1], "8"), "length of the run missing"),
        (("plan", *PREDICT[1:], "--tokens", "1T", "--steps", "9"), "--tokens and --steps both say how long"),
        (("plan", *PREDICT[1:], "--tokens", "1T", "--cluster", "dgx-h100,dgx-h100"), "--cluster names dgx-h100 twice"),
        ((*PREDICT, "--tp", "3", "--cluster", "dgx-h100,dgx-b200"), "stepcast: 64 GPUs are not a multiple of"),
        (("predict", "no-such-file.toml"), "unknown model 'no-such-file.toml', and no such file"),
        ((*PREDICT, "--sharding", "hybrid-fsdp"), "try --shard 8"),
        (("predict", "llama-3.1-8b", "dgx-h100"), "did you mean --cluster dgx-h100?"),
        ((*SEARCH, "--nodes", "2"), "'--nodes'; it is an option of predict"),
        (("plan", *PREDICT[1:], "--step-s", "2", "--steps", "9"), "--cluster has no effect: --step-s states the step"),
        ((*PREDICT, "--fsdp", "--ddp"), "--fsdp and --ddp both set --sharding"),
        (("predict", "llama-3.1-8b", "--cluster", "h10"), "did you mean h100"),
        (("predict", "--config", str(ROOT / "README.md"), "--cluster", "h100"), "is no known configuration"),
        ((*SEARCH, "--max-memory", "80"), "--max-memory: expected a size, such as 70GiB, not '80'"),
        ((*EXPERTS, "--expert-capacity", "0"), "--expert-capacity: expected a number above zero"),
        ((*PREDICT, "--set", "node.nic.bandwidth=fast"), 'write it like "400 Gb/s" or "50 GB/s"'),
        (("simulate", str(EXAMPLES / "megatron-rank7.txt"), "--cluster", "dgx-h100"), "simulate needs a workload"),
        ((*PREDICT, "--bucket-mb", "inf"), "--bucket-mb"),
        ((*PREDICT, "--global-batch", "640000000"), "--global-batch"),
        ((*PREDICT, "--pp", "2", "--stage-layers", ""), "--stage-layers"),
        ((*PREDICT, "--to-workload", "-"), "--to-workload"),
        ((*EXPERTS, "--expert-imbalance", "inf"), "--expert-imbalance"),
        ((*EXPERTS, "--expert-imbalance", "nan"), "--expert-imbalance"),
        ((*EXPERTS, "--expert-imbalance", "0"), "imbalance"),
    ],
)
def test_nonsense_is_one_line(capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], expected: str) -> None:
    status, out, err = run(capsys, *arguments)
    assert (status, out) == (2, "")
    assert err.startswith("stepcast: ")
    assert err.count("\n") == 1
    assert expected in err


def test_overflow_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The file's own numbers may be finite and their sum not."""
    header, rows = Path(TABLE).read_text().split("\n", 1)
    cells = rows.split("\n", 1)[0].split("\t")
    at = header.split("\t").index("forward_compute_time")
    huge = "\n".join("\t".join([*cells[:at], "1e308", *cells[at + 1 :]]) for _ in range(5000))
    path = tmp_path / "huge.tsv"
    path.write_text(f"{header}\n{huge}\n")
    status, out, err = run(capsys, "simulate", str(path), "--cluster", "dgx-h100")
    assert (status, out) == (2, "")
    assert err.count("\n") == 1


def test_workload_is_packed_when_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "workload.et.gz"
    assert run(capsys, *PREDICT, "--gpus", "4", "--to-workload", str(path))[0] == 0
    gzip.decompress((tmp_path / "workload.0.et.gz").read_bytes())
    assert read(path).layout.dp == 4


def test_convert_does_not_overwrite_what_it_reads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "workload.txt"
    path.write_bytes(Path(LLAMA).read_bytes())
    status, out, err = run(capsys, "convert", str(path), str(path), "--to", "json")
    assert (status, out) == (2, "")
    assert "another name" in err
    assert path.read_bytes() == Path(LLAMA).read_bytes()


def test_convert_prints_one_thing(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = run(capsys, "convert", LLAMA, "-", "--to", "simai", "--json")
    assert (status, out) == (2, "")
    assert "standard output" in err


def test_convert_says_what_a_table_cannot_hold(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, _, err = run(capsys, "convert", LLAMA, str(tmp_path / "table.tsv"), "--to", "optable")
    assert status == 0
    assert "one of 16" in err
    assert "1,024" in err


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((*SIMULATE, "--slow-stage", "16=2"), "stage 16"),
        (("simulate", LLAMA, "--engine", "simai", "--trace", "run.json"), "--trace"),
        (("simulate", LLAMA, "--engine", "simai", "--gantt"), "--gantt"),
        (("simulate", LLAMA, "--engine", "simai", "--slow-group", "tp=2"), "--slow-group"),
        ((*SIMULATE, "--nics-per-server", "4"), "--nics-per-server"),
        ((*SIMULATE, "--overlap", "tp=0.5"), "--overlap"),
    ],
)
def test_options_without_effect_are_refused(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], expected: str
) -> None:
    status, out, err = run(capsys, *arguments)
    assert (status, out) == (2, "")
    assert expected in err


@pytest.mark.parametrize(
    ("cluster", "precision", "warned"), [("dgx-2", "bf16", "run as fp32"), ("dgx-h100", "fp8", "")]
)
def test_missing_matrix_units_are_said(
    capsys: pytest.CaptureFixture[str], cluster: str, precision: str, warned: str
) -> None:
    arguments = ("--cluster", cluster, "--gpus", "16", "--precision", precision)
    status, _, err = run(capsys, "predict", "--model", "llama-3.2-1b", *arguments)
    assert status == 0
    assert (warned in " ".join(err.split())) if warned else err == ""


def test_compare_takes_every_measured_format(capsys: pytest.CaptureFixture[str]) -> None:
    paths = [str(EXAMPLES / name) for name in ("optimus-llama-1b.txt", "kineto-llama-1b.json.gz")]
    for first, second in (paths, reversed(paths)):
        assert run(capsys, "compare", first, second)[0] == 0


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((*COLLECTIVE, "--imbalance", "nan"), "--imbalance"),
        ((*COLLECTIVE, "--imbalance", "inf"), "--imbalance"),
        ((*COLLECTIVE, "--ranks", "100000000000"), "--ranks"),
        ((*COLLECTIVE, "--ranks-per-node", "0"), "--ranks-per-node"),
        ((*COLLECTIVE, "--sweep", "--size", "0"), "--size"),
    ],
)
def test_nonsense_collectives(capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], expected: str) -> None:
    status, out, err = run(capsys, *arguments)
    assert (status, out) == (2, "")
    assert err.count("\n") == 1
    assert expected in err


@pytest.mark.parametrize(
    ("what", "key", "name", "number"),
    [
        ("gpus", "gpu", "h100-sxm", "memory_bytes"),
        ("clusters", "cluster", "azure-nd-a100-v4", "nics_per_node"),
        ("models", "model", "llama-3.1-8b", "parameters"),
    ],
)
def test_lists_give_numbers_to_programs_and_whole_names_to_people(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, what: str, key: str, name: str, number: str
) -> None:
    rows = {row[key]: row for row in run_json(capsys, "list", what)[what]}
    assert rows[name][number] > 0
    monkeypatch.setenv("COLUMNS", "60")
    status, out, _ = run(capsys, "list", what)
    assert status == 0
    assert [line.split()[0] for line in out.splitlines()[2:]] == list(rows)


@pytest.mark.parametrize("name", ["simai-gpt-13b.txt", "kineto-llama-1b.json.gz"])
def test_pipes_are_read(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=lambda: pipe.write_bytes((EXAMPLES / name).read_bytes()))
    writer.start()
    found = run_json(capsys, "show", str(pipe))
    writer.join()
    assert found["format"] == name.split("-")[0]


def test_blank_files_are_empty(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "blank"
    path.write_text("\n\n \n")
    assert "is empty" in run(capsys, "show", str(path))[2]


@pytest.mark.parametrize("columns", [80, 120])
def test_predictions_fit_the_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    status, out, _ = run(capsys, *PREDICT, "--tp", "2", "--pp", "4", "--explain-memory", "--gantt", "--critical-path")
    assert status == 0
    assert max(map(len, out.splitlines())) <= columns
    assert "activations" in out


@pytest.mark.parametrize(("cluster", "precision"), [("dgx-a100", "fp8"), ("dgx-h100", "mxfp8"), ("hgx-h200", "nvfp4")])
@pytest.mark.parametrize("words", [("predict",), ("search", "--global-batch", "64")])
def test_scaled_formats_without_matrix_units_are_refused(
    capsys: pytest.CaptureFixture[str], words: tuple[str, ...], cluster: str, precision: str
) -> None:
    """Transformer Engine refuses them too: fp8 from compute capability 8.9 on, mxfp8 and nvfp4 from 10."""
    arguments = ("--model", "llama-3.2-1b", "--cluster", cluster, "--gpus", "8", "--precision", precision)
    status, out, err = run(capsys, *words, *arguments)
    assert (status, out) == (2, "")
    assert f"has no {precision} matrix units; it has fp64" in " ".join(err.split())


def test_an_error_stands_alone(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """What was noted before it concerns an answer that there is not."""
    import stepcast.cli.show as verb
    from stepcast.cli.main import main
    from stepcast.cli.output import print_notes

    def fail(args: object) -> int:
        print_notes(["taken from a file"])
        raise ValueError("no such thing")

    monkeypatch.setattr(verb, "run_list", fail)
    assert main(["list", "gpus"]) == 2
    assert capsys.readouterr().err == "stepcast: no such thing\n"
    monkeypatch.undo()
    assert main(["list", "gpus"]) == 0
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    "question",
    [
        ("predict", "llama-3.1-8b", "--global-batch", "64", "--gpus"),
        ("collective", "all-reduce", "--size", "1GiB", "--gpus"),
        ("generate", "llama-3.1-8b", "--gpus"),
        ("rl", "llama-3.1-8b", "--mode", "split", "--rollout-gpus", "8", "--gpus"),
        ("rl", "llama-3.1-8b", "--search", "--gpus"),
    ],
)
def test_every_verb_says_what_it_does_not_use_of_a_cluster(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], question: tuple[str, ...]
) -> None:
    """More GPUs than a cluster has are refused, and GPUs of its second kind are named as unused."""
    both, few = str(tmp_path / "both.toml"), {"a40-pcie": "16"}
    Path(both).write_text('base = "dgx-h100"\nnodes = 2\n[other]\ncluster = "dgx-a100"\nnodes = 1\n')
    for cluster, gpus in {**few, both: "24"}.items():
        status, _, err = run(capsys, *question, gpus, "--cluster", cluster)
        assert (status, " GPUs are more than the " in err) == (2, True)
    if "--search" not in question:
        _, _, err = run(capsys, *question, "8", "--cluster", both)
        assert err.count("the 8 a100-sxm-80gb of both are not used: only search uses both") == 1
