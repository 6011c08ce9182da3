"""The fluid engine against SimGrid: recorded answers for 100 random networks, and live ones where it is.

``tools/simgrid_flows.py`` made the recorded ones and says how SimGrid was set up.
"""

import gzip
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stepcast.ir.arrays import FloatArray
from stepcast.ir.flows import FlowSet, Links
from stepcast.simulation.fluid.engine import transfers
from tests.shared import ROOT
from tests.simulation.fluid.networks import rates

RECORDED = Path(__file__).parents[2] / "data" / "simgrid-flows.json.gz"
CASES = json.loads(gzip.decompress(RECORDED.read_bytes()))["cases"]
ORACLE = ROOT / "tools" / "simgrid_flows.py"
CROSS = 0.05
CLOSE = 1e-8


def network(case: dict[str, Any]) -> tuple[Links, FlowSet, FloatArray]:
    """Links, flows and what each flow takes at least."""
    capacity = np.array(case["capacity"], np.float64)
    links = Links(("link",), np.zeros(len(capacity), np.int64), capacity)
    first, link, size, weight = [0], [], [], []
    for flow in case["flows"]:
        on: dict[int, float] = {}
        for path, share in ((flow["path"], 1.0), (flow["back"], CROSS)):
            for each in path:
                on[each] = on.get(each, 0.0) + share * flow["size"]
        link += list(on)
        size += list(on.values())
        first.append(len(link))
        weight.append(1 / 1024 / flow["latency"] if flow["latency"] else 1.0)
    flows = FlowSet.of(np.array(first), np.array(link), np.array(size), np.array(weight))
    at_least = [flow["size"] / flow["most"] if flow["most"] else 0.0 for flow in case["flows"]]
    return links, flows, np.maximum(flows.longest_s(links), at_least)


def starts(case: dict[str, Any]) -> FloatArray:
    """Flows begin once their latency has passed."""
    return np.array([flow["start"] + (flow["latency"] or 0.0) for flow in case["flows"]])


def check(case: dict[str, Any], answer: dict[str, Any], compiled: bool) -> None:
    links, flows, alone_s = network(case)
    found = transfers(links, flows, starts(case), alone_s, compiled=compiled)
    np.testing.assert_allclose(found.end_s, answer["finish"], rtol=CLOSE)
    if answer["rates"]:
        sizes = np.array([flow["size"] for flow in case["flows"]])
        shares = rates(links, flows, alone_s, compiled=compiled)
        np.testing.assert_allclose(shares * sizes, answer["rates"], rtol=CLOSE)


@pytest.mark.parametrize("compiled", [False, True], ids=["python", "compiled"])
def test_rates_and_ends_are_those_of_simgrid(compiled: bool) -> None:
    if compiled:
        pytest.importorskip("numba", reason="needs the extra compiled: pip install 'stepcast[compiled]'")
    assert len(CASES) == 100
    for number, case in enumerate(CASES):
        try:
            check(case, case, compiled)
        except AssertionError as error:
            raise AssertionError(f"case {number}") from error


def test_the_recorded_cases_share_weigh_bound_and_cross() -> None:
    """They test what they should: each of these in at least ten of them."""
    flows = [case["flows"] for case in CASES]
    assert sum(case["latency"] is not None for case in CASES) >= 10
    assert sum(any(flow["most"] for flow in each) for each in flows) >= 10
    assert sum(any(flow["back"] for flow in each) for each in flows) >= 10
    assert sum(bool(case["rates"]) for case in CASES) >= 10
    slowed = 0
    for case in CASES:
        _, _, alone_s = network(case)
        slowed += bool((np.array(case["finish"]) > (starts(case) + alone_s) * 1.01).any())
    assert slowed >= 80


@pytest.mark.parametrize("number", [1, 6, 15])
def test_simgrid_still_says_so(number: int, tmp_path: Path) -> None:
    python = os.environ.get("SIMGRID_PYTHON", "/usr/bin/python3")
    if not Path(python).exists() or subprocess.run([python, "-c", "import simgrid"], capture_output=True).returncode:
        pytest.skip("needs SimGrid (Debian: python3-simgrid)")
    (tmp_path / "case.json").write_text(json.dumps(CASES[number]))
    told = subprocess.run(
        [python, str(ORACLE), "--one", str(tmp_path / "case.json")], capture_output=True, text=True, check=True
    )
    check(CASES[number], json.loads(told.stdout.splitlines()[-1]), compiled=False)
