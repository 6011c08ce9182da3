"""``stepcast mcp`` driven by the reference client of the Model Context Protocol over standard streams."""

import re
import sys
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

pytest.importorskip("mcp", reason="needs the extra mcp; 'make test-mcp' installs and runs it")
anyio = pytest.importorskip("anyio")

from mcp import ClientSession, StdioServerParameters, stdio_client  # noqa: E402

from tests.shared import ROOT  # noqa: E402

STEP = {"model": "llama-3.1-8b", "cluster": "dgx-h100", "gpus": 8, "sharding": "zero-3"}
Task = tuple[str, dict[str, Any], Callable[[dict[str, Any]], object]]
# Twelve tasks of an agent: the tool, its arguments, and what the answer must show.
TASKS: tuple[Task, ...] = (
    ("list", {"what": "gpus"}, lambda facts: any("h100" in str(row) for row in facts["gpus"])),
    ("list", {"what": "models"}, lambda facts: len(facts["models"]) > 10),
    ("predict", STEP, lambda facts: facts["step_s"] > 0 and facts["memory_bytes"]["fits"]),
    ("predict", {**STEP, "tp": 2, "seq": "8k"}, lambda facts: facts["strategy"]["tp"] == 2),
    ("predict", {**STEP, "framework": "fsdp"}, lambda facts: "fsdp" in facts["framework"]),
    ("search", {"model": "llama-3.2-1b", "cluster": "dgx-h100", "gpus": 4, "global_batch": 8, "top": 3}, lambda facts: facts["rows"][0]["rank"] == 1),
    ("plan", {"gpus": 64, "step_s": 2, "steps": 100000, "checkpoint_size": "1TB", "runs": 50}, lambda facts: facts["goodput"] > 0),
    ("collective", {"kind": "all-reduce", "size": "1GiB", "ranks": 16, "cluster": "dgx-h100"}, lambda facts: facts["time_s"] > 0),
    ("analyze", {"files": ["kineto-llama-1b.json.gz"]}, lambda facts: facts["operations_s"]["matmul"] > 0.1),
    ("analyze", {"files": ["gate/night-1.log"]}, lambda facts: facts["format"] == "megatron-log"),
    ("analyze", {"files": ["nccl-8-h100.txt"], "cluster": "dgx-h100"}, lambda facts: facts["format"] == "nccl-tests"),
    ("predict", {"model": "llama-3.1-70b", "cluster": "dgx-h100", "gpus": 8}, lambda facts: not facts["memory_bytes"]["fits"]),
)  # fmt: skip


def drive(work: Callable[[ClientSession], Awaitable[None]]) -> None:
    """Run *work* with a client that has started the server on the examples."""

    async def session() -> None:
        words = ["-m", "stepcast", "mcp", "--folder", str(ROOT / "examples")]
        async with (
            stdio_client(StdioServerParameters(command=sys.executable, args=words)) as (read, write),
            ClientSession(read, write) as client,
        ):
            await client.initialize()
            await work(client)

    anyio.run(session)


def facts_of(result: Any) -> dict[str, Any]:
    facts = getattr(result, "structured_content", None) or getattr(result, "structuredContent", None)
    assert isinstance(facts, dict), result
    return facts


def failed(result: Any) -> bool:
    return bool(getattr(result, "is_error", None) or getattr(result, "isError", None))


def test_twelve_tasks() -> None:
    async def work(client: ClientSession) -> None:
        tools = {tool.name: tool for tool in (await client.list_tools()).tools}
        assert set(tools) == {"predict", "search", "plan", "analyze", "collective", "list"}
        for name, arguments, holds in TASKS:
            result = await client.call_tool(name, arguments)
            assert not failed(result), (name, arguments, result.content)
            assert holds(facts_of(result)), (name, arguments)
            assert result.content[0].text

    drive(work)


def test_escapes_and_mistakes_are_refused() -> None:
    async def work(client: ClientSession) -> None:
        for path in ("/etc/passwd", "../README.md", "../../../../etc/hostname"):
            result = await client.call_tool("analyze", {"files": [path]})
            assert failed(result)
            assert "outside of the folder" in result.content[0].text
        result = await client.call_tool("predict", {**STEP, "framework": str(ROOT / "pyproject.toml")})
        assert failed(result)
        for arguments in ({"html": "x.html"}, {"files": ["--html=x"]}, {"files": [{"a": 1}]}):
            result = await client.call_tool("analyze", arguments)
            assert failed(result)
            assert re.search("analyze has no argument|must not begin|must be text", result.content[0].text)

    drive(work)


def test_progress_and_cancel() -> None:
    async def work(client: ClientSession) -> None:
        seen: list[float] = []

        async def note(progress: float, total: float | None, message: str | None) -> None:
            seen.append(progress)

        slow = {"model": "llama-3.1-405b", "cluster": "dgx-h100", "gpus": "512..4096", "global_batch": 2048}
        with anyio.move_on_after(2.5) as scope:
            await client.call_tool("search", slow, progress_callback=note)
        assert scope.cancelled_caught
        assert seen == sorted(seen)
        assert seen
        with anyio.fail_after(30):  # the cancelled search does not hold up the next call
            assert facts_of(await client.call_tool("predict", STEP))["step_s"] > 0

    drive(work)
