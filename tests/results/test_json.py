"""The JSON of every verb has the keys and types that ``docs/json.md`` describes."""

import json
from pathlib import Path

import pytest

from stepcast.cli.main import main
from tools.describe_json import COMMANDS, PAGE, ROWS, describe, find_mismatches, read_page

pytestmark = pytest.mark.slow

DESCRIBED = read_page(PAGE.read_text(encoding="utf-8"))
CASES = [(verb, words) for verb, (_, commands) in COMMANDS.items() for words in commands[:2]]


@pytest.mark.parametrize(("verb", "words"), CASES)
def test_json_has_the_keys_and_types_of_its_description(
    verb: str, words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("rows").mkdir()
    Path("rows", "ops.csv").write_text("".join(ROWS))
    assert main([*words, "--json"]) in (0, 1)
    rows = describe([json.loads(capsys.readouterr().out)])
    assert find_mismatches(rows, DESCRIBED[verb]) == [], "run python -m tools.describe_json if this is meant"


def test_a_mismatch_is_found() -> None:
    described = describe([{"links": [{"link": "leaf 0", "busy": 0.5}], "note": None}])
    assert find_mismatches(describe([{"links": [{"link": "leaf 0", "busy": "much", "new": 1}]}]), described) == [
        ".links[].new: not described",
        ".links[].busy: text, described as number",
        ".note: missing",
    ]
    assert find_mismatches(
        describe([{"links": [{"link": "a"}, {"link": "b", "busy": 1}], "note": None}]), described
    ) == [".links[].busy: missing"]


def test_the_page_describes_every_verb() -> None:
    assert DESCRIBED.keys() == COMMANDS.keys()
    assert all(len(rows) > 5 for rows in DESCRIBED.values())
