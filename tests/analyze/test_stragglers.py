"""Straggler traces: the published answers of two real jobs, and small ones whose answer is plain."""

import gzip
import json
from pathlib import Path

import numpy as np
import pytest

from stepcast.analyze.stragglers import Stragglers
from stepcast.inputs.errors import FormatError
from stepcast.inputs.source import Source
from stepcast.inputs.stragglers import looks_like, read
from tests.shared import ROOT

DATA = ROOT.parent / "shared" / "data" / "stragglers"
HEAD = "dp_rank,stage,rank,step,optype,start_ts,duration,seq_id,mc,mb_id,gmc\n"


def job(slow: float = 1.0, replicas: int = 2, micro_batches: int = 3) -> Stragglers:
    """One stage of several replicas, whose gradients are summed; replica 0 computes *slow* times as long."""
    rows = []
    for step in (1, 2):
        for replica in range(replicas):
            at, unit = 0.0, slow if replica == 0 else 1.0
            for kind in ("forward-compute", "backward-compute"):
                for number in range(micro_batches):
                    rows.append((replica, 0, replica, step, kind, at, unit, number, 0, number, 0))
                    at += unit
            end = 2 * micro_batches * max(slow, 1.0) + 0.5
            rows.append((replica, 0, replica, step, "grads-reduce-scatter", at, end - at, 0, 0, -1, -1))
    text = HEAD + "\n".join(",".join(map(str, row)) for row in rows) + "\n"
    return Stragglers(read(Source("job.csv", text.encode())))


def test_a_job_without_stragglers_is_not_slowed_down() -> None:
    found = job()
    assert found.slowdown == pytest.approx(1.0)
    assert found.undelayed_s == pytest.approx([6.5, 6.5])


def test_a_slow_replica_explains_what_is_lost() -> None:
    """Six computes of 3 s beside six of 1 s: the usual one takes 2 s."""
    found = job(slow=3.0)
    assert found.undelayed_s == pytest.approx([18.5, 18.5])
    assert found.ideal_s == pytest.approx([12.5, 12.5])
    assert found.slowdown == pytest.approx(18.5 / 12.5)
    assert found.by_replica[0] == pytest.approx(18.5 / 12.5)
    assert found.facts()["stragglers"][0]["rank"] == 0


def test_a_transfer_is_what_follows_the_last_start() -> None:
    """The reduce-scatter of the fast replica waits 12 s; both take half a second of their own."""
    found = job(slow=3.0)
    scatter = [at for at, each in enumerate(found.run.operations) if each.kind == "grads-reduce-scatter"]
    assert np.allclose(found.recorded_s[:, :, scatter], 0.5)


@pytest.mark.skipif(not DATA.is_dir(), reason="the published traces are not here")
@pytest.mark.parametrize("name", ["ST", "AR"])
def test_published_answers(name: str) -> None:
    found = Stragglers(read(Source(DATA / f"trace-{name}.csv.gz")))
    expected = json.loads((DATA / f"expected-{name}.json").read_text())
    result = expected["result"]
    assert found.slowdown == pytest.approx(result["blocking_slowdown"], rel=1e-5)
    assert found.undelayed_s == pytest.approx(list(result["step_t_nodelay"].values()), abs=1e-4)
    assert found.last_stage_share == pytest.approx(expected["ms"]["Ms"], abs=1e-4)
    assert found.worst_workers_share == pytest.approx(expected["mw"]["Mw"], abs=1e-4)
    stages = result["blocking_decompose_by_stage"]
    assert found.by_stage == pytest.approx([stages[str(at)] for at in range(len(stages))], abs=1e-5)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (HEAD, "holds no operation"),
        (HEAD + "0,0,0,1,gc,x,0,0,-1,0,-1\n", "expected numbers"),
        (HEAD + "0,0,0,1,gc,0,-1,0,-1,0,-1\n", "finite"),
        (HEAD + "1,0,0,1,gc,0,1,0,-1,0,-1\n", "every stage"),
        (HEAD.replace("seq_id,", ""), "seq_id is missing"),
    ],
)
def test_what_is_wrong_is_told(text: str, said: str) -> None:
    with pytest.raises(FormatError, match=said):
        read(Source("job.csv", text.encode()))


def test_recognised_compressed_too(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv.gz"
    path.write_bytes(gzip.compress(HEAD.encode()))
    assert looks_like(Source(path).head)
