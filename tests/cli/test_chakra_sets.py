"""Chakra through the command line: sets of one file per rank, written and read, and what their messages cost."""

import json
from pathlib import Path
from typing import Any

import pytest

from stepcast import read
from stepcast.cli.main import main
from stepcast.inputs.chakra.nodes import decode
from stepcast.inputs.chakra.protobuf import AttributeKind, attribute
from tests.cli.test_main import run
from tests.inputs.test_chakra import COLL, COMP, METADATA, RECV, SEND, coll, node, peers

H100 = ("--cluster", "dgx-h100")
LLAMA = ("predict", "--model", "llama-3.1-8b-l8", *H100, "--seq", "2048", "--global-batch", "16")


def run_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    status, out, err = run(capsys, *arguments, "--json")
    assert status == 0, err
    found: dict[str, Any] = json.loads(out)
    return found


def size(size_bytes: int) -> bytes:
    return attribute("comm_size", AttributeKind.INT64, size_bytes)


def write(path: Path, *nodes: bytes) -> str:
    path.write_bytes(METADATA + b"".join(nodes))
    return str(path)


def test_a_send_costs_what_a_transfer_costs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write(
        tmp_path / "t.et",
        node(1, COMP, "c", (), 1000),
        node(2, SEND, "s", (1,), 0, size(10**9), *peers(0, 1)),
        node(3, COMP, "d", (2,), 1000),
    )
    found = run_json(capsys, "simulate", file, *H100)
    # 1 GB over NVLink at 450 GB/s takes 2.2 ms at best.
    assert found["step_s"] > 2e-3 + 1e9 / 450e9
    assert found["step_s"] < 2e-3 + 1e9 / 200e9
    assert found["breakdown_s"]["compute"] == pytest.approx(2e-3)


def test_gathers_grow_with_the_ranks_that_gpus_states(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    gather = write(tmp_path / "g.et", node(1, COLL, "g", (), 0, *coll(2, 10**8)))
    reduce = write(tmp_path / "r.et", node(1, COLL, "r", (), 0, *coll(7, 8 * 10**8)))
    gathered = run_json(capsys, "simulate", gather, *H100, "--gpus", "8")
    # Each rank brings 100 MB to the gather, and 800 MB to the scatter that moves as much.
    scattered = run_json(capsys, "simulate", reduce, *H100, "--gpus", "8")
    assert gathered["step_s"] == pytest.approx(scattered["step_s"], rel=0.05)
    assert gathered["step_s"] > 7e8 / 450e9
    assert not any("--gpus" in warning for warning in gathered["warnings"])
    assert any("--gpus" in warning for warning in run_json(capsys, "show", gather)["warnings"])


@pytest.mark.parametrize(
    "strategy",
    [
        ("--gpus", "8", "--tp", "2", "--pp", "4"),
        ("--gpus", "8", "--tp", "2", "--pp", "2", "--vpp", "2"),
        ("--gpus", "4", "--pp", "4", "--schedule", "zb-h1"),
        ("--gpus", "4", "--pp", "2", "--schedule", "dualpipe"),
        ("--gpus", "4", "--cp", "2"),
        ("--gpus", "4", "--pp", "2", "--overlap", "gradients"),
    ],
    ids=["1f1b", "interleaved", "zb-h1", "dualpipe", "ring", "blocking"],
)
def test_what_predict_writes_takes_as_long_when_read_back(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], strategy: tuple[str, ...]
) -> None:
    out = str(tmp_path / "w.et")
    predicted = run_json(capsys, *LLAMA, *strategy, "--to-workload", out)
    ranks = int(strategy[1])
    assert len(list(tmp_path.glob("w.*.et"))) == ranks
    for place in (out, str(tmp_path)):
        found = run_json(capsys, "simulate", place, *H100)
        assert found["step_s"] == pytest.approx(predicted["step_s"], rel=1e-9)
        assert found["warnings"] == []
    again = str(tmp_path / "again")
    assert run(capsys, "convert", out, again, "--to", "chakra")[0] == 0
    assert read(again) == read(out)
    status, _, err = run(capsys, "convert", out, out, "--to", "chakra")
    assert (status, "is a file that is read" in err) == (2, True)


def test_the_files_are_as_astra_sim_reads_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    strategy = ("--gpus", "16", "--tp", "2", "--pp", "4")
    run_json(capsys, *LLAMA, *strategy, "--to-workload", str(tmp_path / "w.et"))
    groups = json.loads((tmp_path / "w.comm_group.json").read_text())
    assert [0, 1] in groups.values()
    assert [0, 2] in groups.values()
    sent: list[tuple[int, ...]] = []
    received: list[tuple[int, ...]] = []
    for rank in range(16):
        nodes = decode((tmp_path / f"w.{rank}.et").read_bytes(), "w")
        for index in range(len(nodes)):
            _, kind, values = nodes.content(index)
            if kind == COLL and "pg_name" in values:
                assert rank in groups[values["pg_name"]]
            if kind in (SEND, RECV):
                message = tuple(values[f"comm_{name}"] for name in ("src", "dst", "tag", "size"))
                assert rank == message[0 if kind == SEND else 1]
                (sent if kind == SEND else received).append(message)  # type: ignore[arg-type]
    assert sorted(sent) == sorted(received)
    # Forward and back between 4 stages of 4 ranks, 8 micro-batches of each replica.
    assert len(set(sent)) == len(sent) == 2 * 3 * 4 * 8


def test_each_file_of_a_set_holds_the_workload_and_sets_are_not_mixed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = str(tmp_path / "w.et")
    predicted = run_json(capsys, *LLAMA, "--gpus", "4", "--pp", "2", "--to-workload", out)
    alone = run_json(capsys, "simulate", str(tmp_path / "w.3.et"), *H100)
    assert alone["step_s"] == pytest.approx(predicted["step_s"], rel=1e-9)
    run_json(capsys, *LLAMA, "--gpus", "2", "--pp", "2", "--to-workload", out)
    status, _, err = run(capsys, "simulate", out, *H100)
    assert status == 2
    assert "is of another set" in err
    half = run_json(capsys, "show", str(tmp_path / "w.0.et"), str(tmp_path / "w.1.et"))
    assert half["format"] == "chakra"


def test_worlds_too_large_for_a_file_per_rank_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    large = ("--gpus", "16384", "--tp", "8", "--pp", "2", "--global-batch", "16384")
    status, _, err = run(capsys, *LLAMA, *large, "--to-workload", str(tmp_path / "w.et"))
    assert status == 2
    assert "fewer replicas" in err
    assert list(tmp_path.iterdir()) == []


def test_ranks_of_another_program_are_one_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for rank in range(4):
        group = str(1 + rank // 2)
        write(
            tmp_path / f"t.{rank}.et",
            node(1, COMP, "c", (), 1000 + 10 * rank),
            node(2, COLL, "g", (1,), 0, *coll(2, 10**8, group)),
        )
    (tmp_path / "groups.json").write_text('{"1": [0, 1], "2": [2, 3]}')
    workload = read(tmp_path)
    assert (workload.layout.tp, workload.layout.dp, workload.layout.pp) == (2, 2, 1)
    assert workload.stages[0].body_layers()[1].forward[0].work.size_bytes == 2 * 10**8
    found = run_json(capsys, "simulate", str(tmp_path), *H100)
    assert found["breakdown_s"]["compute"] == pytest.approx(1030e-6)
    assert any("represents all" in warning for warning in found["warnings"])
    write(tmp_path / "t.3.et", node(1, COMP, "c", (), 1000))
    status, _, err = run(capsys, "simulate", str(tmp_path), *H100)
    assert (status, err.count("\n")) == (2, 1)
    assert "runs other ops than" in err


def test_stages_of_another_program_differ(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for rank in range(2):
        write(
            tmp_path / f"t.{rank}.et",
            node(1, COMP, "first", (), 1000),
            node(2, SEND, "s", (1,), 0, size(10**6), *peers(rank, 2 + rank)),
        )
        write(
            tmp_path / f"t.{2 + rank}.et",
            node(1, RECV, "r", (), 0, size(10**6), *peers(rank, 2 + rank)),
            node(2, COMP, "last", (1,), 3000),
        )
    workload = read(tmp_path)
    assert (workload.layout.pp, workload.layout.dp, len(workload.stages)) == (2, 2, 2)
    found = run_json(capsys, "simulate", str(tmp_path), *H100)
    assert len(found["stages"]) == 2
    assert found["step_s"] > 3e-3


def test_a_prediction_written_as_chakra_is_shown_and_simulated_as_predicted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prefix = str(tmp_path / "step")
    command = [
        "predict",
        "llama-3.2-1b",
        "--cluster",
        "dgx-h100",
        "--gpus",
        "4",
        "--pp",
        "2",
        "--tp",
        "2",
        "--global-batch",
        "4",
        "--json",
    ]
    assert main([*command, "--to-workload", f"{prefix}.et"]) == 0
    predicted = json.loads(capsys.readouterr().out)
    assert main(["simulate", prefix, "--cluster", "dgx-h100", "--json"]) == 0
    simulated = json.loads(capsys.readouterr().out)
    assert simulated["breakdown_s"] == pytest.approx(predicted["breakdown_s"])
    run = {name: predicted["run"][name] for name in ("model", "seq", "micro_batch", "global_batch", "pp", "gpus")}
    assert run.items() <= simulated["run"].items()
    assert simulated["warnings"] == []
    assert main(["simulate", prefix, "--cluster", "dgx-a100", "--json"]) == 0
    assert (
        "compute times of h100-sxm, which are not changed for a100"
        in json.loads(capsys.readouterr().out)["warnings"][0]
    )
    assert main(["simulate", prefix, "--cluster", "dgx-h100"]) == 0
    assert "of communication alone: compute times are those of the file" in capsys.readouterr().out
    assert main(["convert", prefix, str(tmp_path / "step.txt"), "--to", "simai"]) == 2
    assert "holds one pipeline stage, and the 2 of this workload differ" in capsys.readouterr().err
    assert main(["show", prefix]) == 0
    out = capsys.readouterr().out
    assert f"{prefix} (5 files)" in out
    assert "of one rank of each of the 2 stages" in " ".join(out.split())
