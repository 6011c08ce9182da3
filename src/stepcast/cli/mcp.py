"""``stepcast mcp``: the answers of stepcast as tools for agents, over the Model Context Protocol on standard streams.

The protocol is JSON-RPC 2.0, a message per line (modelcontextprotocol.io, transport stdio). Calls are answered one
after the other in a second process, which reads one folder alone and ends when a call is cancelled or takes too long.
"""

import argparse
import json
import os
import sys
import threading
import time
from contextlib import suppress
from queue import SimpleQueue
from typing import TYPE_CHECKING

from stepcast.ir.children import block_interrupts
from stepcast.ir.facts import FactDict, Facts
from stepcast.version import __version__

if TYPE_CHECKING:
    from multiprocessing.connection import Connection
    from multiprocessing.context import SpawnProcess

VERSIONS = ("2025-11-25", "2025-06-18", "2025-03-26", "2024-11-05")
MOST_MESSAGE_BYTES = 2**20
MOST_WAITING = 32
MOST_BYTES = 16 * 2**30
PROGRESS_S = 0.5
PARSE_ERROR, INVALID_REQUEST, UNKNOWN_METHOD, INVALID_ARGUMENTS = -32700, -32600, -32601, -32602
INSTRUCTIONS = (
    "Forecasts and explains distributed LLM training. Use list for the names of models, clusters, GPUs and frameworks; "
    "predict for one step, search for the best strategy, plan for a whole run, collective for one collective, and "
    "analyze for measured traces and logs in the folder that the server was given. Times are seconds, sizes bytes."
)


def run(args: argparse.Namespace) -> int:
    if args.folder is not None and not os.path.isdir(args.folder):
        raise ValueError(f"{args.folder}: is no folder")
    AgentServer(args.folder, float(args.max_seconds)).serve()
    return 0


class AgentServer:
    """Reads messages from standard input and answers on standard output."""

    def __init__(self, folder: str | None, most_s: float) -> None:
        self.folder, self.most_s = folder, most_s
        self._calls: SimpleQueue[FactDict | None] = SimpleQueue()
        self._waiting: dict[str, threading.Event] = {}  # calls that are not answered; set: cancelled
        self._lock = threading.Lock()
        self._process: tuple[SpawnProcess, Connection] | None = None

    def serve(self) -> None:
        """Answer until standard input ends."""
        runner = threading.Thread(target=self._run_calls, daemon=True)
        runner.start()
        while line := sys.stdin.buffer.readline(MOST_MESSAGE_BYTES + 1):
            if len(line) > MOST_MESSAGE_BYTES:
                while line and not line.endswith(b"\n"):
                    line = sys.stdin.buffer.readline(MOST_MESSAGE_BYTES)
                self._fail(None, INVALID_REQUEST, f"a message has at most {MOST_MESSAGE_BYTES} bytes")
            elif line.strip():
                self._receive(line)
        for cancelled in [*self._waiting.values()]:
            cancelled.set()
        self._calls.put(None)
        runner.join(5)
        self._end_process()

    def _receive(self, line: bytes) -> None:
        try:
            message = json.loads(line)
        except (ValueError, RecursionError):
            return self._fail(None, PARSE_ERROR, "expected one JSON object per line")
        if not isinstance(message, dict) or not isinstance(message.get("method"), str):
            if not (isinstance(message, dict) and ("result" in message or "error" in message)):
                self._fail(None, INVALID_REQUEST, "expected a request with a method")
            return None
        params = message.get("params")
        self._dispatch(message.get("id"), message["method"], params if isinstance(params, dict) else {})
        return None

    def _dispatch(self, number: object, method: str, params: FactDict) -> None:
        from stepcast.cli.mcp_tools import describe_tools

        if method == "notifications/cancelled":
            if cancelled := self._waiting.get(_key(params.get("requestId"))):
                cancelled.set()
        elif number is None:
            return  # other notifications need no answer
        elif method == "initialize":
            asked = params.get("protocolVersion")
            self._answer(
                number,
                {
                    "protocolVersion": asked if asked in VERSIONS else VERSIONS[0],
                    "capabilities": {"tools": {}},
                    "serverInfo": {"name": "stepcast", "version": __version__},
                    "instructions": INSTRUCTIONS,
                },
            )
        elif method == "ping":
            self._answer(number, {})
        elif method == "tools/list":
            self._answer(number, {"tools": describe_tools()})
        elif method == "tools/call":
            self._take_call(number, params)
        else:
            self._fail(number, UNKNOWN_METHOD, f"unknown method {method[:80]!r}")

    def _take_call(self, number: object, params: FactDict) -> None:
        from stepcast.cli.mcp_tools import ToolError, command_line

        arguments, meta = params.get("arguments") or {}, params.get("_meta") or {}
        try:
            if not isinstance(arguments, dict) or not isinstance(meta, dict):
                raise ToolError("arguments must be an object")
            words = command_line(str(params.get("name")), arguments)
        except ToolError as error:
            return self._fail(number, INVALID_ARGUMENTS, str(error))
        if len(self._waiting) >= MOST_WAITING:
            return self._answer(number, _result(False, f"{MOST_WAITING} calls are waiting already; try again later"))
        self._waiting[_key(number)] = threading.Event()
        self._calls.put({"number": number, "words": words, "token": meta.get("progressToken")})
        return None

    def _run_calls(self) -> None:
        while call := self._calls.get():
            cancelled = self._waiting[_key(call["number"])]
            if not cancelled.is_set():
                result = self._run_call(call, cancelled)
                if result is not None:  # a cancelled call has no answer
                    self._answer(call["number"], result)
            self._waiting.pop(_key(call["number"]), None)

    def _run_call(self, call: Facts, cancelled: threading.Event) -> FactDict | None:
        """Return the result of a call; None if it was cancelled."""
        began = reported = time.monotonic()
        try:
            pipe = self._start_process()
            pipe.send(call["words"])
            while not pipe.poll(0.02):
                now = time.monotonic()
                if cancelled.is_set():
                    self._end_process()
                    return None
                if now - began > self.most_s:
                    self._end_process()
                    return _result(False, f"the call took more than {self.most_s:.0f} seconds and was ended")
                if call["token"] is not None and now - reported >= PROGRESS_S:
                    reported = now
                    progress = {"progressToken": call["token"], "progress": now - began, "message": "computing"}
                    self._send({"jsonrpc": "2.0", "method": "notifications/progress", "params": progress})
            return _result(*pipe.recv())
        except (EOFError, OSError):
            self._end_process()
            return _result(False, "the process that answers ended; it may have run out of memory")

    def _start_process(self) -> "Connection":
        """Return the pipe to the process that answers, which is started where none is alive."""
        if self._process is not None and self._process[0].is_alive():
            return self._process[1]
        import multiprocessing

        from stepcast.cli.mcp_tools import answer_calls

        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(target=answer_calls, args=(theirs, self.folder, MOST_BYTES), daemon=True)
        self._process = process, ours
        with block_interrupts():
            process.start()
        theirs.close()
        return ours

    def _end_process(self) -> None:
        if self._process is not None:
            process, pipe = self._process
            process.kill()
            process.join(5)
            pipe.close()
            self._process = None

    def _answer(self, number: object, result: Facts) -> None:
        self._send({"jsonrpc": "2.0", "id": number, "result": result})

    def _fail(self, number: object, code: int, message: str) -> None:
        self._send({"jsonrpc": "2.0", "id": number, "error": {"code": code, "message": message}})

    def _send(self, message: Facts) -> None:
        with self._lock, suppress(BrokenPipeError):
            sys.stdout.write(json.dumps(message) + "\n")
            sys.stdout.flush()


def _key(number: object) -> str:
    return json.dumps(number)


def _result(worked: bool, text: str, facts: object = None) -> FactDict:
    result: FactDict = {"content": [{"type": "text", "text": text}], "isError": not worked}
    return {**result, "structuredContent": facts} if facts is not None else result
