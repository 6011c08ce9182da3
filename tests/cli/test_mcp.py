"""``stepcast mcp`` by its messages: limits, cancelled calls, damaged messages, paths outside of the folder."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from stepcast.cli.mcp import TOOLS, command_line, describe_tools, shorten
from stepcast.models.catalog import model_names

pytestmark = pytest.mark.slow


def talk(folder: Path, *lines: str) -> dict[Any, dict[str, Any]]:
    """Return the answers to messages by their number."""
    text = "".join(f"{line}\n" for line in lines)
    command = [sys.executable, "-m", "stepcast", "mcp", "--folder", str(folder), "--max-seconds", "60"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdin
        assert server.stdout
        server.stdin.write(text)
        server.stdin.flush()
        answers: dict[Any, dict[str, Any]] = {}
        wanted = {json.loads(line)["id"] for line in lines if line.startswith('{"id"')}
        for line in server.stdout:
            message = json.loads(line)
            answers[message.get("id")] = message
            if wanted <= answers.keys():
                break
        server.stdin.close()
        assert server.wait(20) == 0
    return answers


def call(number: int, tool: str, **arguments: Any) -> str:
    return json.dumps(
        {"id": number, "jsonrpc": "2.0", "method": "tools/call", "params": {"name": tool, "arguments": arguments}}
    )


def test_messages(tmp_path: Path) -> None:
    outside = tmp_path / "outside.toml"
    outside.write_text("secret = 1\n")
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "link.toml").symlink_to(outside)
    answers = talk(
        folder,
        "not JSON",
        "[" * 5000,
        "x" * (2**20 + 100),
        call(1, "analyze", files=["link.toml"]),
        call(2, "predict", model="llama-3.1-8b", cluster="../outside.toml", gpus=8),
        call(3, "predict", model="m" * 100_000, cluster="dgx-h100", gpus=8),
        '{"id": 4, "method": "nothing"}',
        call(5, "predict", model="llama-3.1-8b", gpuz=8),
        call(6, "collective", kind="all-reduce", size="1MiB", ranks=8, cluster="dgx-h100"),
    )
    for number in (1, 2):
        assert answers[number]["result"]["isError"]
        assert "outside of the folder" in answers[number]["result"]["content"][0]["text"]
        assert "secret" not in json.dumps(answers[number])
    assert answers[3]["result"]["isError"]
    assert answers[4]["error"]["code"] == -32601
    assert answers[5]["result"]["isError"]
    assert "no argument 'gpuz'; did you mean gpu" in answers[5]["result"]["content"][0]["text"]
    assert answers[6]["result"]["structuredContent"]["time_s"] > 0
    assert answers[None]["error"]["code"] in (-32700, -32600)


def test_list_names_everything_that_there_is(tmp_path: Path) -> None:
    """The rows of an answer are cut at 50, and there are more models."""
    result = talk(tmp_path, call(1, "list", what="models"))[1]["result"]
    count, _, names = result["content"][0]["text"].partition(" models: ")
    assert names.split(", ") == list(model_names())
    assert int(count) == len(model_names()) == 50 + result["structuredContent"]["left_out"]["models"]


def test_schemas_follow_the_questions() -> None:
    tools = {tool["name"]: tool["inputSchema"]["properties"] for tool in describe_tools()}
    assert set(tools) == set(TOOLS)
    assert tools["predict"]["tp"]["description"].startswith("tensor-parallel ranks")
    assert "1f1b" in tools["predict"]["schedule"].get("enum", ["1f1b"])
    assert not {"html", "save", "output", "trace"} & set(tools["predict"]) | set(tools["search"]) & {"workers", "emit"}
    words = command_line(
        "predict", {"model": "m", "sequence_parallel": False, "set": ["a=1", "b=2"], "gpus": 8, "tp": None}
    )
    assert words == ["predict", "--model=m", "--no-sequence-parallel", "--set=a=1", "--set=b=2", "--gpus=8", "--json"]


def test_long_answers_are_cut() -> None:
    facts = shorten({"rows": [{"ranks": list(range(100))}] * 60, "few": [1]})
    assert facts["left_out"] == {"rows": 10, "rows.ranks": 50}
    assert len(json.dumps(shorten({"rows": [["x" * 5000] * 50] * 50}))) < 500_000
