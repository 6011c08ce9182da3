"""Engines of clusters give the rows that this machine's processes give, nodes lost on the way or not.

Each needs its package, which the extra of its name installs; without it its tests are skipped.
"""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from stepcast.sweep.engines import ENGINES, load_engine
from tests.sweep import questions
from tests.sweep.questions import table

# Packages of engines warn of what is theirs to mend.
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("local")
    questions.run(str(folder), workers=2)
    return table(folder)


@pytest.mark.parametrize("name", [name for name, (_, package) in ENGINES.items() if package])
def test_an_engine_that_is_not_installed_says_what_to_install(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    package = ENGINES[name][1]
    monkeypatch.setitem(__import__("sys").modules, package, None)
    with pytest.raises(ValueError, match=rf"needs the package {package}: pip install 'stepcast\[{name}\]'"):
        load_engine(name)


def test_dask(tmp_path: Path, local: list[dict[str, Any]]) -> None:
    pytest.importorskip("distributed", reason="needs the extra dask: pip install 'stepcast[dask]'")
    questions.run(str(tmp_path), engine="dask", workers=2)
    assert table(tmp_path) == local


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
