"""Decisions as a lead asks for them: the command line, Python and the app give the same answer."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

import stepcast
from stepcast.cli.main import main

M8 = {"model": "llama-3.1-8b", "cluster": "dgx-h100", "framework": "megatron-core", "gpus": "64", "global_batch": "256"}
M8 |= {"seq": "4096"}
M70 = {**M8, "model": "llama-3.1-70b", "tp": "8", "pp": "2"}
SMALL = {**M8, "model": "llama-3.2-1b", "gpus": "8", "global_batch": "32", "seq": "2048", "top": "3"}
RUN = {"tokens": "100", "price": "2.5"}  # the app counts tokens in billions
# Question, verb, choices; a second value of cluster or framework is compared.
TASKS: dict[str, tuple[str, dict[str, str]]] = {
    "how long is a step of the 70B on 64 H100?": ("predict", M70),
    "does it fit on one node?": ("predict", {**M70, "gpus": "8", "pp": "1"}),
    "what does fp8 bring on B200?": ("predict", {**M8, "cluster": "dgx-b200", "precision": "fp8"}),
    "H100 or B200 for this model?": ("alternatives", {**M8, "cluster_2": "dgx-b200"}),
    "Megatron-Core or torchtitan?": ("alternatives", {**M8, "framework_2": "torchtitan"}),
    "H100, H200 or B200, and at what cost?": (
        "alternatives",
        {**M8, "cluster_2": "hgx-h200", "cluster_3": "dgx-b200", **RUN},
    ),
    "how long and how expensive are 100B tokens?": ("plan", {**M8, **RUN}),
    "in euros, with four spare nodes?": ("plan", {**M70, **RUN, "currency": "EUR", "spares": "4"}),
    "what if nothing failed?": ("plan", {**M8, **RUN, "failures": "none"}),
    "which layout is fastest on 8 GPUs?": ("search", SMALL),
    "which layout needs least memory?": ("search", {**SMALL, "objective": "memory"}),
    "which layout with tp 2 in fp8?": ("search", {**SMALL, "tp": "2", "precision": "fp8"}),
}


def settle_task(verb: str, choices: dict[str, str]) -> tuple[str, dict[str, str]]:
    """Return the verb of the command line and its choices: values of one name are joined, tokens are in billions."""
    joined: dict[str, str] = {}
    for name, value in choices.items():
        plain = re.sub(r"_[23]$", "", name)
        joined[plain] = f"{joined[plain]},{value}" if plain in joined else value
    if "tokens" in joined:
        joined["tokens"] += "B"
    return ("plan" if "tokens" in joined else "predict") if verb == "alternatives" else verb, joined


def ask_python(verb: str, asked: str, choices: dict[str, Any]) -> dict[str, Any]:
    if verb == "alternatives":
        return stepcast.alternatives(asked, **choices).to_dict()
    if verb == "search":
        return stepcast.search(**{**choices, "top": int(choices["top"])}, workers=1).to_dict()
    return (stepcast.plan(**choices) if verb == "plan" else stepcast.predict(**choices)).to_dict()


def agrees(theirs: Any, ours: Any) -> bool:
    """Return True if every value of *ours* is the same in *theirs*, to the last bit."""
    if isinstance(ours, dict):
        return all(name in theirs and agrees(theirs[name], value) for name, value in ours.items())
    if isinstance(ours, list | tuple):
        return len(theirs) == len(ours) and all(agrees(*pair) for pair in zip(theirs, ours, strict=True))
    return bool(theirs == ours)


# Text that names the caller, and what only a command has.
OWN = ("command", "commands", "assumptions", "warnings", "sources")


@pytest.mark.parametrize("question", TASKS)
def test_an_answer_is_the_same_everywhere(
    question: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], app: str, opened: Any
) -> None:
    verb, given = TASKS[question]
    asked, choices = settle_task(verb, given)
    page = tmp_path / "page.html"
    words = [word for name, value in choices.items() for word in (f"--{name.replace('_', '-')}", value)]
    words += ["--allow-oom"] if asked == "plan" and verb == "plan" else []
    assert main([asked, *words, "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    ours = json.loads(json.dumps(ask_python(verb, asked, choices)))
    rows = ours.get("rows") or ours.get("alternatives") or [ours]
    for row in [ours, *rows]:
        for name in OWN:
            row.pop(name, None)
    assert agrees(printed, ours)
    assert main([asked, *words, "--html", str(page)]) == 0
    capsys.readouterr()
    query = "&".join(f"{name}={value}" for name, value in given.items())
    seen = opened(f"{app}#{verb}?{query}")
    if verb == "search":
        seen.page.click("#search-go")
        seen.page.get_by_text("done", exact=True).wait_for()
    # The app replaces a live answer by the whole page a moment later: wait for that before reading texts.
    seen.page.wait_for_selector("#answer[data-whole] h1" if verb == "predict" else "#answer[data-answered] h1")
    written = opened(page)
    assert seen.page.inner_text("#answer h1") == written.page.inner_text("h1")
    assert seen.page.locator("#answer .card").all_inner_texts() == written.page.locator(".card").all_inner_texts()
    assert seen.page.evaluate("document.documentElement.scrollWidth") <= 1200
    assert seen.wrong == written.wrong == []
    assert all(each.startswith(app) for each in seen.asked)
