"""``stepcast mcp``: the answers of stepcast as tools for agents, over the Model Context Protocol on standard streams.

The protocol is JSON-RPC 2.0, a message per line (modelcontextprotocol.io, transport stdio). Calls are answered one
after the other in a second process, which reads one folder alone and ends when a call is cancelled or takes too long.
"""

import argparse
import contextlib
import io
import json
import os
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from functools import cache
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from stepcast.cli.main import VERBS, build_parser, main
from stepcast.cli.output import WRITTEN
from stepcast.ir.children import Child
from stepcast.ir.types import FactDict, Facts, require
from stepcast.units import nearest
from stepcast.version import __version__
from stepcast.views.declared import phrase

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

VERSIONS = ("2025-11-25", "2025-06-18", "2025-03-26", "2024-11-05")
MOST_MESSAGE_BYTES = 2**20
MOST_WAITING = 32
MOST_BYTES = 16 * 2**30
PROGRESS_S = 0.5
PARSE_ERROR, INVALID_REQUEST, UNKNOWN_METHOD, INVALID_ARGUMENTS = -32700, -32600, -32601, -32602


def run(args: argparse.Namespace) -> int:
    require(args.folder is None or os.path.isdir(args.folder), f"{args.folder}: is no folder")
    AgentServer(args.folder, float(args.max_seconds)).serve()
    return 0


class AgentServer:
    """Reads messages from standard input and answers on standard output."""

    def __init__(self, folder: str | None, most_s: float) -> None:
        self.folder, self.most_s = folder, most_s
        self._calls: SimpleQueue[FactDict | None] = SimpleQueue()
        self._waiting: dict[str, threading.Event] = {}  # calls that are not answered; set: cancelled
        self._lock = threading.Lock()
        self._child: Child | None = None

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
        known = message if isinstance(message, dict) else {}
        method, params = known.get("method"), known.get("params")
        if isinstance(method, str):
            self._dispatch(known.get("id"), method, params if isinstance(params, dict) else {})
        elif not known.keys() & {"result", "error"}:
            self._fail(None, INVALID_REQUEST, "expected a request with a method")
        return None

    def _dispatch(self, number: object, method: str, params: FactDict) -> None:
        if method == "notifications/cancelled":
            if cancelled := self._waiting.get(_key(params.get("requestId"))):
                cancelled.set()
        elif number is None:
            return  # other notifications need no answer
        elif method == "initialize":
            asked = params.get("protocolVersion")
            version = {"protocolVersion": asked if asked in VERSIONS else VERSIONS[0]}
            about = {"capabilities": {"tools": {}}, "serverInfo": {"name": "stepcast", "version": __version__}}
            self._answer(number, {**version, **about, "instructions": phrase("agent-instructions", {})})
        elif method == "ping":
            self._answer(number, {})
        elif method == "tools/list":
            self._answer(number, {"tools": describe_tools()})
        elif method == "tools/call":
            self._take_call(number, params)
        else:
            self._fail(number, UNKNOWN_METHOD, f"unknown method {method[:80]!r}")

    def _take_call(self, number: object, params: FactDict) -> None:
        arguments, meta = params.get("arguments") or {}, params.get("_meta") or {}
        try:
            if not isinstance(arguments, dict) or not isinstance(meta, dict):
                raise ToolError("arguments must be an object")
            words = command_line(str(params.get("name")), arguments)
        except ToolError as error:
            if params.get("name") in TOOLS:  # an answer that an agent can correct itself by
                return self._answer(number, _result(False, str(error)))
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
            if self._child is None or not self._child.process.is_alive():
                self._child = Child(answer_calls, self.folder, MOST_BYTES)
            pipe = self._child.pipe
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

    def _end_process(self) -> None:
        if self._child is not None:
            self._child.end()
            self._child = None

    def _answer(self, number: object, result: Facts) -> None:
        self._send({"jsonrpc": "2.0", "id": number, "result": result})

    def _fail(self, number: object, code: int, message: str) -> None:
        self._send({"jsonrpc": "2.0", "id": number, "error": {"code": code, "message": message}})

    def _send(self, message: Facts) -> None:
        with self._lock, contextlib.suppress(BrokenPipeError):
            sys.stdout.write(json.dumps(message) + "\n")
            sys.stdout.flush()


def _key(number: object) -> str:
    return json.dumps(number)


def _result(worked: bool, text: str, facts: object = None) -> FactDict:
    result: FactDict = {"content": [{"type": "text", "text": text}], "isError": not worked}
    return {**result, "structuredContent": facts} if facts is not None else result


# ---- tools: schemas from the options of verbs, answers in a process that reads one folder -------------------

TOOLS = ("predict", "search", "plan", "analyze", "collective", "list")
# Options that write files, print progress or start processes.
LEFT_OUT = {*WRITTEN, "help", "json", "emit", "verbose", "gantt", "workers", "name", "run"}
MOST_ROWS = 50  # of each list of an answer
MOST_CHARACTERS = 400_000  # of an answer
READABLE = ("/dev/null", "/dev/urandom", "/proc/cpuinfo", "/proc/meminfo", "/etc/localtime")
REFUSED = ("subprocess.Popen", "os.system", "os.exec", "os.fork", "os.posix_spawn", "socket.connect", "socket.bind")


class ToolError(ValueError):
    """Arguments that a tool does not take."""


@cache
def _actions(tool: str) -> Mapping[str, argparse.Action]:
    """Return the options of a verb by their names in a schema."""
    parser = build_parser([verb for verb in VERBS if verb.name == tool])
    groups = next(action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    return {action.dest: action for action in groups.choices[tool]._actions if action.dest not in LEFT_OUT}


def describe_tools() -> list[FactDict]:
    """Return the tools as ``tools/list`` gives them."""
    about, hints = {verb.name: verb.about for verb in VERBS}, {"readOnlyHint": True, "openWorldHint": False}
    tools = []
    for tool in TOOLS:
        actions = _actions(tool).items()
        words = {name: (action.help or "").replace("%%", "%") for name, action in actions}
        properties = {name: {"description": words[name], **_type(action)} for name, action in actions}
        required = [name for name, action in actions if action.required and action.nargs not in ("?", "*")]
        schema = {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
        tools.append({"name": tool, "description": about[tool], "inputSchema": schema, "annotations": hints})
    return tools


def _type(action: argparse.Action) -> FactDict:
    if isinstance(action, argparse.BooleanOptionalAction) or action.nargs == 0:
        return {"type": "boolean"}
    if isinstance(action, argparse._AppendAction) or action.nargs == "+":
        return {"type": "array", "items": {"type": "string"}}
    if action.choices is not None:
        return {"type": "string", "enum": [str(choice) for choice in action.choices]}
    return {"type": "string"} if action.type in (None, str) else {"type": ["string", "number"]}


def command_line(tool: str, arguments: Facts) -> list[str]:
    """Return the words of the command that the *arguments* of a tool ask for."""
    if tool not in TOOLS:
        raise ToolError(f"unknown tool {tool!r}; choose from {', '.join(TOOLS)}")
    actions = _actions(tool)
    places: list[str] = []
    options: list[str] = []
    for name, value in arguments.items():
        action = actions.get(name)
        if action is None:
            raise ToolError(f"{tool} has no argument {name!r}{nearest(name, actions) or '; see its schema'}")
        kind = _type(action).get("type")
        if value is None:
            continue
        values = value if isinstance(value, list) else [value]
        if kind == "boolean":
            if not isinstance(value, bool):
                raise ToolError(f"{name} must be true or false, not {value!r}")
            denied = next((option for option in action.option_strings if option.startswith("--no-")), None)
            options += action.option_strings[:1] if value else [denied] if denied else []
        elif not all(isinstance(item, str | int | float) and not isinstance(item, bool) for item in values):
            raise ToolError(f"{name} must be text or a number, not {json.dumps(value)[:80]}")
        elif action.option_strings:
            if kind != "array" and isinstance(value, list):
                value = ",".join(map(str, value))
                values = [value]
            options += [f"{action.option_strings[-1]}={item}" for item in values]
        else:
            if any(str(item).startswith("-") for item in values):
                raise ToolError(f"{name} must not begin with '-'")
            places += map(str, values)
    # A search in several processes could not be ended as one.
    return [tool, *places, *options, *(["--workers=1"] if tool == "search" else []), "--json"]


# ---- the process that answers -------------------------------------------------------------------------------


def confine(folder: str | None) -> None:
    """Let this process read *folder*, its own programs and nothing else; let it write nothing and reach nobody."""
    import msgspec
    import numpy
    import yaml

    package = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
    # Not sys.path: it names the folder in which the server was started.
    installed = [os.path.dirname(os.path.dirname(str(module.__file__))) for module in (msgspec, numpy, yaml)]
    own = os.path.realpath(folder) if folder else None
    readable = [os.path.realpath(root) for root in (os.path.dirname(os.__file__), package, *installed)]
    readable += [own] if own else []
    sys.dont_write_bytecode = True
    os.chdir(own or package)

    def check(event: str, given: tuple[object, ...]) -> None:
        if event in REFUSED:
            raise PermissionError(f"{event} is not allowed in a tool")
        if event not in ("open", "os.listdir", "os.scandir", "sqlite3.connect"):
            return
        path = given[0]
        if not isinstance(path, str | bytes) or (event == "sqlite3.connect" and path == ":memory:"):
            return
        name = os.fsdecode(path)
        if event == "sqlite3.connect":
            name = name.removeprefix("file://").removeprefix("file:").partition("?")[0]
        flags = given[2] if event == "open" else 0
        if isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT) and name != os.devnull:
            raise PermissionError(f"{name}: tools write no files")
        real = os.path.realpath(name)
        if real in READABLE or any(real == root or real.startswith(root + os.sep) for root in readable):
            return
        raise PermissionError(f"{name}: is outside of the folder that --folder allows")

    sys.addaudithook(check)


def answer_calls(pipe: "Connection", folder: str | None, most_bytes: int) -> None:
    """Answer the calls that come through *pipe*, until it is closed."""
    import gc

    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (most_bytes, most_bytes))
    for tool in TOOLS:
        _actions(tool)
    confine(folder)
    gc.enable()
    with contextlib.suppress(EOFError, KeyboardInterrupt):
        while True:
            pipe.send(_answer(pipe.recv()))


def _answer(words: Sequence[str]) -> tuple[bool, str, object]:
    """Return whether a command worked, its short text, and its JSON."""
    out, err = io.StringIO(), io.StringIO()
    status = 2
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), contextlib.suppress(SystemExit):
            status = main(words)
        facts = json.loads(out.getvalue()) if status in (0, 1) else None
    except Exception as error:  # a mistake of ours is an answer too, and no end of the session
        return False, f"{type(error).__name__}: {error}"[:2000], None
    if facts is None:
        return False, err.getvalue().removeprefix("stepcast: ").strip()[:2000], None
    facts = facts if isinstance(facts, dict) else {"rows": facts}
    return True, summarise(words[0], facts), shorten(facts)


def shorten(facts: FactDict) -> FactDict:
    """Return the answer with its long lists cut, and the number of entries that were left out."""
    left_out: dict[str, int] = {}

    def cut(value: Any, place: str, most: int) -> Any:
        if isinstance(value, dict):
            return {key: cut(item, f"{place}.{key}" if place else key, most) for key, item in value.items()}
        if isinstance(value, list):
            if len(value) > most:
                left_out[place] = len(value) - most
            return [cut(item, place, most) for item in value[:most]]
        return value

    most = MOST_ROWS
    shorter = cut(facts, "", most)
    while most > 1 and len(json.dumps(shorter)) > MOST_CHARACTERS:
        most //= 2
        left_out.clear()
        shorter = cut(facts, "", most)
    return {**shorter, "left_out": left_out} if left_out else shorter


def summarise(tool: str, facts: Facts) -> str:
    """Return the answer in a sentence or two; of a list all names, since its rows may be cut."""
    if tool == "list":
        lists = {kind: rows for kind, rows in facts.items() if isinstance(rows, list)}
        names = {kind: ", ".join(str(next(iter(row.values()))) for row in rows) for kind, rows in lists.items()}
        words = "\n".join(f"{len(rows)} {kind}: {names[kind]}" for kind, rows in lists.items())
    elif tool == "search":
        words = phrase("agent-search", facts["rows"][0]) if facts.get("rows") else ""
    else:
        memory, stragglers = facts.get("memory_bytes"), facts.get("stragglers")
        used = {"verdict": memory.get("fits"), **memory} if isinstance(memory, dict) else None
        known: FactDict = {**facts, "memory": used, "straggler": stragglers[0] if stragglers else None}
        words = phrase(f"agent-{'plan' if tool == 'plan' else 'time'}", known) or phrase("agent-step", known)
    warnings = [f"warning: {text}" for text in facts.get("warnings", ())[:3]]
    return "\n".join([words or "answered", *warnings])
