"""``stepcast network``: what links did, told as text and as JSON that agree with each other."""

import json
from pathlib import Path
from typing import Any

import pytest

from stepcast.views.step import network_view
from stepcast.views.terminal import SHADES, render_text, shade, shade_line
from tests.cli.test_main import run, run_json
from tests.shared import ROOT

SMALL = ["--model", "llama-3.2-1b", "--cluster", "dgx-h100", "--gpus", "16", "--tp", "2", "--gbs", "16"]
NARROW = ["--set", "network.leaf_nodes=1", "--set", "network.oversubscription=4"]
WORKLOAD = str(ROOT / "examples" / "simai-gpt-13b.txt")


@pytest.fixture(scope="module")
def narrow(request: pytest.FixtureRequest) -> dict[str, Any]:
    """A step over leaves that send a fourth of what they take."""
    import contextlib
    import io

    from stepcast.cli.main import main

    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        assert main(["network", *SMALL, *NARROW, "--json"]) == 0
    found: dict[str, Any] = json.loads(out.getvalue())
    return found


def test_a_narrow_network_is_full_and_slows_those_that_cross_it(narrow: dict[str, Any]) -> None:
    assert narrow["step_s"] > narrow["alone_step_s"]
    tiers = {each["tier"]: each for each in narrow["tiers"]}
    assert tiers["leaf to spine"]["busiest_share"] == pytest.approx(1.0, abs=0.02)
    assert tiers["NIC"]["busiest_share"] < 0.5
    first = narrow["hottest"][0]
    assert first["tier"] in ("leaf to spine", "spine to leaf")
    assert first["full_s"] > 0
    slowed = {row["group"] for row in narrow["operations"] if row["slowdown"] > 1.5}
    assert slowed == {"dp"}, "tensor ranks stay within their node"


def test_shares_of_links_agree_with_their_bytes(narrow: dict[str, Any]) -> None:
    for tier in narrow["tiers"]:
        assert tier["share"] == pytest.approx(sum(tier["share_over_time"]) / len(tier["share_over_time"]))
        assert all(0 <= share <= 1 + 1e-6 for share in tier["busiest_over_time"])
    for link in narrow["hottest"]:
        assert sum(link["users"].values()) == pytest.approx(link["bytes"], rel=1e-6)


def test_where_hardly_anything_is_shared_all_three_steps_are_one(capsys: pytest.CaptureFixture[str]) -> None:
    """Rings of data parallelism and tensor ranks meet on NVLink alone, for moments."""
    found = run_json(capsys, "network", *SMALL)
    assert found["alone_step_s"] == found["fast_step_s"]
    assert found["alone_step_s"] <= found["step_s"] < 1.002 * found["alone_step_s"]


@pytest.mark.parametrize("more", [[], NARROW])
def test_a_link_is_at_capacity_only_while_it_is_used_so_much(
    more: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """At capacity is 95 % of it and more, whether links are shared or not; bins bound how long that is.

    A bin that is used by m of its capacity is at capacity for at least (m - 0.95) / 0.05 of its time.
    """
    found = run_json(capsys, "network", *SMALL, *more)
    step_s, links = found["step_s"], found["hottest"]
    for link in links:
        bins = link["share_over_time"]
        least_s = sum(max(0.0, (used - 0.95) / 0.05) for used in bins) * step_s / len(bins)
        assert least_s * (1 - 1e-6) <= link["full_s"] <= link["share"] * step_s / 0.95 * (1 + 1e-6)
    assert any(link["full_s"] > 0.1 * step_s for link in links)
    status, text, _ = run(capsys, "network", *SMALL, *more)
    assert status == 0
    assert "full" not in text
    first = links[0]
    use, at_capacity = first["share"] * 100, first["full_s"] / step_s * 100
    line = next(line for line in text.splitlines() if line.startswith("busiest link "))
    assert f"mean use {use:.1f} %, at capacity {at_capacity:.1f} %" in line.replace(" 0 %", " 0.0 %")


@pytest.mark.parametrize("width", [80, 120])
def test_the_text_fits_a_terminal_and_says_the_same(narrow: dict[str, Any], width: int) -> None:
    text = render_text(network_view(narrow), width)
    assert max(map(len, text.splitlines())) <= width
    assert narrow["hottest"][0]["link"] in text
    assert "reduce-scatter" in text
    assert "leaf to spine" in text


def test_a_workload_file_runs_too(capsys: pytest.CaptureFixture[str]) -> None:
    found = run_json(capsys, "network", WORKLOAD, "--cluster", "dgx-h100")
    assert found["workload"] == WORKLOAD
    assert found["gpus"] == 512
    status, _, error = run(capsys, "network", WORKLOAD, "--cluster", "dgx-h100", "--tp", "4")
    assert status == 2
    assert "--tp has no effect" in error


def test_a_page_is_written(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    page = tmp_path / "n.html"
    status, out, _ = run(capsys, "network", *SMALL, *NARROW, "--html", str(page))
    assert status == 0
    assert "open it in a browser" in out
    assert "The busiest links over time" in page.read_text()


def test_one_gpu_has_no_network(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, error = run(capsys, "network", "--model", "llama-3.2-1b", "--gpu", "h200")
    assert status == 0
    assert not error
    assert "none is used" in out


def test_shades_tell_idle_from_little_and_full_from_much() -> None:
    assert [shade(share, 10) for share in (0.0, 1e-9, 0.5, 0.94, 1.0, 1.2)] == [0, 1, 5, 8, 9, 9]
    assert shade_line([0.0] * 6 + [1.0] * 6, 4) == "  " + SHADES[-1] * 2
    assert shade_line([], 10) == ""


def test_the_fast_engine_says_what_it_leaves_out(capsys: pytest.CaptureFixture[str]) -> None:
    """A link that failed changes nothing there: whoever named one is told."""
    slow = ("--set", "network.slow=['node 1 NIC 2 up: 0.5']", "--set", "network.routing=ecmp")
    where = ("--cluster", "dgx-h100", *slow)
    told = "network.routing and network.slow: the fast engine leaves it out of account; --engine fluid does not"
    one = ("collective", "all-reduce", "--ranks", "16", "--size", "1GiB", *where)
    step = ("predict", "--model", "llama-3.2-1b", "--gpus", "16", *where)
    for words in (one, step):
        assert told in run_json(capsys, *words)["warnings"]
        assert told not in run_json(capsys, *words, "--engine", "fluid")["warnings"]


def test_a_step_that_does_not_fit_is_stated(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("network", "llama-3.1-405b-l8", "--cluster", "dgx-h100", "--gpus", "8", "--tp", "8")
    fits, misfits = (run_json(capsys, *words, "--micro-batch", size)["warnings"] for size in ("1", "16"))
    assert not any("does not fit" in text for text in fits)
    assert any(text.startswith("the step does not fit: ") for text in misfits)
