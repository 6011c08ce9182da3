"""Residuals: asked for, told, and nothing outside the framework and the GPUs they were fitted on."""

import json
from pathlib import Path
from typing import Any

import pytest

from stepcast.cli.main import main
from stepcast.frameworks.catalog import framework_names, load_profile
from stepcast.hardware.described import CatalogError
from stepcast.ir.band import Residual

RUN = ["predict", "--model", "llama-3.1-70b", "--cluster", "dgx-h100", "--framework", "nemo"]
RUN += ["--gpus", "64", "--tp", "8", "--seq", "8192"]


def answer(words: list[str], capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    assert main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert isinstance(found, dict)
    return found


def test_every_time_is_corrected_and_the_answer_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    plain, corrected = answer(RUN, capsys), answer([*RUN, "--residual"], capsys)
    residual = load_profile("nemo").residual("hopper", experts=False)
    assert residual is not None
    assert plain["residual"] is None
    assert corrected["residual"] == residual.facts()
    assert corrected["step_s"] == pytest.approx(plain["step_s"] * residual.factor)
    assert sum(corrected["breakdown_s"].values()) == pytest.approx(corrected["step_s"])
    assert corrected["mfu"] == pytest.approx(plain["mfu"] / residual.factor)
    assert any("residual of nemo, dense on hopper" in note for note in corrected["assumptions"])
    ends = corrected["uncertainty"]
    assert ends["low_s"] <= corrected["step_s"] <= ends["high_s"]


@pytest.mark.parametrize(
    "elsewhere",
    [
        ["--framework", "megascale"],  # fitted on ampere alone
        ["--framework", "transformers"],
        ["--cluster", "a40-pcie", "--gpus", "8"],
    ],
)
def test_it_is_refused_where_nobody_measured(elsewhere: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*RUN, *elsewhere, "--residual"]) == 2
    assert "--residual has no effect: no measured run of a model like llama-3.1-70b with" in capsys.readouterr().err


def test_profiles_that_build_on_others_have_their_own_or_none() -> None:
    assert load_profile("megatron-bridge").residuals == ()
    assert load_profile("nemo").residuals != load_profile("megatron-bridge-26.02").residuals


def test_each_says_its_rows_and_spread() -> None:
    known = [each for name in framework_names() for each in load_profile(name).residuals]
    assert len(known) >= 15
    assert all(each.rows >= 5 and each.sources >= 1 and each.spread <= 0.25 for each in known)


def test_a_profile_of_ones_own_may_hold_some(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    table = 'factor = 1.1\nrows = 7\nsources = 1\nspread = 0.02\n\n[sources]\nresidual = "our own runs"\n'
    file.write_text(f'extends = "nemo"\n\n[residual.hopper.dense]\n{table}')
    assert load_profile(str(file)).residuals == (Residual("hopper", False, 1.1, 7, 1, 0.02),)
    for wrong in ("[residual.hopper.sparse]\n" + table, "[residual.hopper.dense]\nfactor = 1.1\n"):
        file.write_text(f'extends = "nemo"\n\n{wrong}')
        with pytest.raises(CatalogError, match=r"residual\.hopper"):
            load_profile(str(file))
