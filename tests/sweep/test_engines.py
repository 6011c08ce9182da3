"""Engines of clusters give the rows that this machine's processes give, nodes lost on the way or not.

Each needs its package, which the extra of its name installs; without it its tests are skipped.
"""

import gc
import os
import random
import signal
import sys
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from stepcast.sweep.engines import ENGINES, AnsweredChunk, PointChunk, load_engine, run_tasks
from tests.shared import ROOT
from tests.sweep import questions
from tests.sweep.questions import table

# Packages of engines warn of what is theirs to mend.
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def collect() -> Iterator[None]:
    """Collect sockets that an engine left open while warnings are ignored; no other test is blamed for them."""
    yield
    if {"ray", "distributed"} & sys.modules.keys():  # takes seconds in a process with the caches of many tests
        gc.collect()


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("local")
    questions.run(str(folder), workers=2)
    return table(folder)


@pytest.mark.parametrize("name", [name for name, (_, package) in ENGINES.items() if package])
def test_an_engine_that_is_not_installed_says_what_to_install(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    package = ENGINES[name][1]
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ValueError, match=rf"needs the package {package}: pip install 'stepcast\[{name}\]'"):
        load_engine(name)


def test_dask(tmp_path: Path, local: list[dict[str, Any]]) -> None:
    pytest.importorskip("distributed", reason="needs the extra dask: pip install 'stepcast[dask]'")
    questions.run(str(tmp_path), engine="dask", workers=2)
    assert table(tmp_path) == local


def test_a_point_that_kills_its_workers_on_dask(tmp_path: Path, local: list[dict[str, Any]]) -> None:
    pytest.importorskip("distributed", reason="needs the extra dask: pip install 'stepcast[dask]'")
    questions.run(str(tmp_path), questions.deadly, engine="dask", workers=2)
    check_one_killed(tmp_path, local)


def check_one_killed(folder: Path, local: list[dict[str, Any]]) -> None:
    """The deadly point has its error, and every other point its answer."""
    killed = [row for row in table(folder) if "workers died" in str(row["error"])]
    assert [(row["model"], row["tp"], row["pp"]) for row in killed] == [("b", 4, 16)]
    places = {row["position"] for row in killed}
    assert [row for row in table(folder) if row["position"] not in places] == [
        row for row in local if row["position"] not in places
    ]


@pytest.mark.parametrize("seed", range(20))
def test_only_points_that_kill_their_workers_are_blamed(seed: int) -> None:
    """A cluster of four workers ends every task that runs next to a deadly one, as schedulers do."""
    deadly = set(random.Random(seed).sample(range(20), 4))
    given: dict[int, PointChunk] = {}
    ended: set[int] = set()
    numbers = count()

    def take() -> tuple[int, AnsweredChunk | str]:
        if any(task not in ended and chunk.words[0]["n"] in deadly for task, chunk in given.items()):
            ended.update(given)
        task, chunk = next(iter(given.items()))
        return task, "killed" if task in ended else AnsweredChunk(chunk, [{}], 0.1)

    chunks = (PointChunk("predict", (bytes([n]),), ({"n": n},)) for n in range(20))
    answered = list(run_tasks(chunks, given, lambda chunk: next(numbers), take, lambda: 4))
    assert sorted(each.chunk.words[0]["n"] for each in answered) == list(range(20))
    assert {each.chunk.words[0]["n"] for each in answered if each.answers[0].get("error")} == deadly


def test_nothing_listens_at_a_wrong_address(tmp_path: Path) -> None:
    pytest.importorskip("distributed", reason="needs the extra dask: pip install 'stepcast[dask]'")
    with pytest.raises(ValueError, match="no Dask scheduler answers there"):
        questions.run(str(tmp_path), engine="dask", address="tcp://127.0.0.1:9")


def test_files_that_points_name_are_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers on other machines see none of the driver's folders; here they run in another one."""
    pytest.importorskip("distributed", reason="needs the extra dask: pip install 'stepcast[dask]'")
    from distributed import LocalCluster

    paths = [str(ROOT), str(ROOT / "src")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    elsewhere, here = tmp_path / "elsewhere", tmp_path / "here"
    elsewhere.mkdir()
    (here / "below").mkdir(parents=True)
    (here / "below" / "seconds.txt").write_text("1.5")
    monkeypatch.chdir(elsewhere)
    with LocalCluster(n_workers=1, threads_per_worker=1, dashboard_address=None) as cluster:
        monkeypatch.chdir(here)
        text = '[fixed]\nconfig = "below/seconds.txt"\n[[axis]]\ntp = [1, 2]'
        found = questions.run(
            str(tmp_path / "out"), questions.reading, text=text, engine="dask", address=cluster.scheduler_address
        )
        assert (found.answered, found.errors) == (2, 0)
        text = text.replace("below/seconds.txt", str(here / "below" / "seconds.txt"))
        with pytest.raises(ValueError, match="must be below the current folder"):
            questions.run(str(tmp_path / "out"), questions.reading, text=text, engine="dask")


def test_slurm_by_its_stand_in(tmp_path: Path, local: list[dict[str, Any]]) -> None:
    pytest.importorskip("submitit", reason="needs the extra slurm: pip install 'stepcast[slurm]'")
    few = 'where = "pp < 4"\n' + questions.SPEC
    questions.run(str(tmp_path), text=few, engine="slurm", workers=4, address="local")
    places = {row["position"] for row in table(tmp_path)}
    assert len(places) == 24
    assert table(tmp_path) == [row for row in local if row["position"] in places]


@pytest.fixture
def two_nodes() -> Iterator[Any]:
    """A Ray cluster of two nodes, each with a raylet of its own."""
    pytest.importorskip("ray", reason="needs the extra ray: pip install 'stepcast[ray]'")
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    cluster.add_node(num_cpus=1)
    try:
        yield cluster
    finally:
        cluster.shutdown()


def test_a_ray_cluster_loses_a_node_half_way(
    tmp_path: Path, local: list[dict[str, Any]], two_nodes: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(["src", ".", os.environ.get("PYTHONPATH", "")]))
    lost: list[int] = []

    def lose(progress: Any) -> None:
        if not lost and progress.new >= questions.POINTS // 4:
            node = next(iter(two_nodes.worker_nodes))
            lost.append(node.all_processes["raylet"][0].process.pid)
            os.kill(lost[0], signal.SIGKILL)

    found = questions.run(str(tmp_path), questions.slow, engine="ray", workers=2, address=two_nodes.address, watch=lose)
    assert lost
    assert found.answered == questions.POINTS
    assert table(tmp_path) == local


def test_a_point_that_kills_its_workers_on_ray(
    tmp_path: Path, local: list[dict[str, Any]], two_nodes: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(["src", ".", os.environ.get("PYTHONPATH", "")]))
    questions.run(str(tmp_path), questions.deadly, engine="ray", address=two_nodes.address)
    check_one_killed(tmp_path, local)


def test_another_version_on_a_node_of_ray(tmp_path: Path, two_nodes: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(["src", ".", os.environ.get("PYTHONPATH", "")]))
    with pytest.raises(ValueError, match="runs another version of stepcast"):
        questions.run(str(tmp_path), engine="ray", address=two_nodes.address, identify=questions.other_program)
    assert table(tmp_path) == []


def test_no_ray_cluster_listens_at_a_wrong_address(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="needs the extra ray: pip install 'stepcast[ray]'")
    with pytest.raises(ValueError, match="no Ray cluster answers there"):
        questions.run(str(tmp_path), engine="ray", address="127.0.0.1:9")
