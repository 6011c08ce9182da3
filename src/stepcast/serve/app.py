"""The routes of the app, whose answers are computed elsewhere, in threads that take turns; and its access control.

The app answers its own page on this machine; its guard checks every request first. It refuses pages of other sites
(Origin and Sec-Fetch-Site), names that were made to point here (Host), requests without the token of its URL, and
requests that are too large.
"""

import asyncio
import hmac
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, MutableMapping
from concurrent.futures import Future
from functools import lru_cache
from importlib.resources import files
from queue import SimpleQueue
from threading import Lock, Thread
from time import sleep
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from uvicorn.protocols.http.h11_impl import H11Protocol

from stepcast.ir.types import FactDict, Facts, dataclass
from stepcast.serve.fields import FORMS, PREDICT, FieldError, FormChoices, name_fields, read_form, shell
from stepcast.views.document import Page, build_policy, load_asset, render, render_body, to_plain_json
from stepcast.views.text import message

Report = Callable[[dict[str, str]], None]
"""Called with the progress of an answer in another process, or with nothing; raises a LeftError to end it."""
Pause = Callable[[], None]
"""Called between the parts of a long answer."""
PAUSE_S = 0.002
LOOK_EVERY_S = 0.5
MOST_FILES = 512
SAVED_ANSWERS = 512
NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9._ -]+")
LONGEST_NAME = 80
# Errors in the input of a user, as on the command line.
MISTAKES = (ValueError, OSError, MemoryError, ArithmeticError, RuntimeWarning, RecursionError)
ASSETS = {"page.css": "text/css", "page.js": "text/javascript", "app.css": "text/css", "app.js": "text/javascript"}
Scope = MutableMapping[str, Any]
Message = Scope
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]
MOST_QUERY_BYTES = 16_384
FIRST_REQUEST_S = 5.0  # from the connection to the end of the headers of its first request
HEADERS = {
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "x-frame-options": "DENY",
    "cache-control": "no-store",
}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


@dataclass(frozen=True, slots=True)
class AppAnswer:
    """A page, and its summary for comparisons."""

    page: Page
    summary: Facts

    def facts(self) -> FactDict:
        return {"html": str(render_body(self.page)), "command": self.page.about.command, "summary": self.summary}


Answer = Callable[..., AppAnswer]
"""``answer(verb, choices, ...)`` is the answer of a verb for the choices of its form. Predictions take a Pause too, and
are complete only with it; searches take a Report, as do analyses, after their files and choices; comparisons take the
choices of both sides.
"""


class LeftError(Exception):
    """The client did not wait for its answer."""


class Workers:
    """Daemon threads that do their work in turn; the program ends without waiting for them."""

    def __init__(self, count: int) -> None:
        self.given: SimpleQueue[tuple[Future[object], Callable[[], object]]] = SimpleQueue()
        for _ in range(count):
            Thread(target=self._work, daemon=True).start()

    def _work(self) -> None:
        while True:
            future, work = self.given.get()
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(work())
            except BaseException as error:  # raised where the result is awaited
                future.set_exception(error)

    def submit(self, work: Callable[[], Any]) -> Future[Any]:
        future: Future[Any] = Future()
        self.given.put((future, work))
        return future


class Turns:
    """A lock, since cost estimates are shared; long answers let waiting ones go first."""

    def __init__(self) -> None:
        self.lock, self.counting, self.waiting = Lock(), Lock(), 0

    def __enter__(self) -> None:
        with self.counting:
            self.waiting += 1
        self.lock.acquire()
        with self.counting:
            self.waiting -= 1

    def __exit__(self, *_: object) -> None:
        self.lock.release()

    def rest(self) -> None:
        """Release the lock so that waiting threads can run, and take it again; the caller holds it."""
        while self.waiting:
            self.lock.release()
            sleep(PAUSE_S)
            self.lock.acquire()


def make_app(answer: Answer, token: str, hosts: frozenset[str], most_bytes: int) -> "Guard":
    """Return the app behind its guard."""
    routes = _Routes(answer)
    inner = Starlette(
        routes=[
            Route("/", routes.home),
            Route("/answer", routes.answer),
            Route("/whole", routes.whole),
            Route("/page", routes.page),
            Route("/compare", routes.compare),
            Route("/search", routes.search),
            Route("/plan", routes.run),
            Route("/alternatives", routes.run),
            Route("/analyze", routes.analyze, methods=["POST"]),
            *(Route(f"/{name}", routes.asset, name=name) for name in ASSETS),
        ]
    )
    return Guard(inner, token, hosts, most_bytes)


@lru_cache
def _load_asset(name: str) -> str:
    if name.startswith("page."):
        return load_asset(name)
    return files("stepcast.serve").joinpath("assets", name).read_text("utf-8")


class _Routes:
    def __init__(self, answer: Answer) -> None:
        self.ask = answer
        self.turns = Turns()
        # Searches and uploads run in processes; their threads wait for them, and no other answer waits for these.
        self.quick, self.slow, self.uploads, self.searches = (Workers(2) for _ in range(4))
        self.predict = lru_cache(SAVED_ANSWERS)(self._predict_quickly)

    def _predict_quickly(self, choices: FormChoices) -> bytes:
        with self.turns:
            return _encode(self.ask("predict", choices, None))

    def _predict_fully(self, choices: FormChoices) -> AppAnswer:
        with self.turns:
            return self.ask("predict", choices, self.turns.rest)

    async def home(self, request: Request) -> Response:
        return HTMLResponse(shell(_load_asset("shell.html")))

    async def asset(self, request: Request) -> Response:
        name = request.url.path.rpartition("/")[2]
        return Response(_load_asset(name), media_type=ASSETS[name])

    async def answer(self, request: Request) -> Response:
        """Answer at once, without a timeline."""
        return await self._answer(lambda: self.predict(_read_predict(request.query_params)), self.quick)

    async def whole(self, request: Request) -> Response:
        """Answer with the timeline and changes to try."""
        return await self._answer(lambda: _encode(self._predict_fully(_read_predict(request.query_params))), self.slow)

    async def page(self, request: Request) -> Response:
        """Answer with the file that ``--html`` writes."""
        try:
            choices = _read_predict(request.query_params)
            page = await _run(self.slow, lambda: render(self._predict_fully(choices).page))
        except MISTAKES as error:
            return _mistake(error)
        return Response(page, media_type="text/html", headers={"content-security-policy": build_policy()})

    async def compare(self, request: Request) -> Response:
        def answer() -> bytes:
            # Each side is ``a=1&b=2``; values are names and numbers without escapes.
            texts = (request.query_params.get(name, "").split("&") for name in ("first", "second"))
            pairs = ((pair.partition("=")[::2] for pair in text if pair) for text in texts)
            sides = [_read_predict(dict(side)) for side in pairs]
            with self.turns:
                return _encode(self.ask("compare", *sides))

        return await self._answer(answer, self.quick)

    async def run(self, request: Request) -> Response:
        """Answer about a whole run: planned, or with several clusters and frameworks in one table."""

        def answer() -> bytes:
            form = request.url.path.rpartition("/")[2]
            choices = read_form(FORMS[form], request.query_params)
            with self.turns:
                return _encode(self.ask(form, choices))

        return await self._answer(answer, self.slow, request.url.path.rpartition("/")[2])

    async def analyze(self, request: Request) -> Response:
        try:
            data = await request.body()
        except RefusedError as refused:
            return JSONResponse({"error": refused.why}, refused.status, {"connection": "close"})
        header, gone = request.headers.get("x-files", ""), False

        def report(_: dict[str, str]) -> None:
            if gone:
                raise LeftError

        def answer() -> bytes:
            report({})
            choices = read_form(FORMS["dropped"], request.query_params)
            try:
                listed = json.loads(header)
                sizes = [int(entry["size"]) for entry in listed]
                names = [str(entry["name"]) for entry in listed]
            except (ValueError, KeyError, TypeError):
                raise FieldError("the request does not list its files") from None
            if not 1 <= len(sizes) <= MOST_FILES or min(sizes) < 0 or sum(sizes) != len(data):
                raise FieldError(
                    f"the request has no files, more than {MOST_FILES}, or files of other sizes than it lists"
                )
            files, start = [], 0
            for name, size in zip(names, sizes, strict=True):
                last = NOT_IN_NAMES.sub("_", name.replace("\\", "/").rpartition("/")[2])
                files.append((last.strip(". ")[-LONGEST_NAME:] or "file", data[start : start + size]))
                start += size
            return _encode(self.ask("analyze", files, choices, report))

        async def leave() -> None:
            nonlocal gone
            while not await request.is_disconnected():
                await asyncio.sleep(LOOK_EVERY_S)
            gone = True

        leaving = asyncio.create_task(leave())
        try:
            return await self._answer(answer, self.uploads, "dropped")
        except LeftError:
            return Response(status_code=499)
        finally:
            leaving.cancel()

    async def _answer(self, answer: Callable[[], bytes], pool: Workers, form: str = "predict") -> Response:
        try:
            return Response(await _run(pool, answer), media_type="application/json")
        except MISTAKES as error:
            return _mistake(error, form)

    async def search(self, request: Request) -> Response:
        """Answer with events: the progress, then the result; a client that leaves ends the search."""
        return StreamingResponse(self._search(request.query_params), media_type="text/event-stream")

    async def _search(self, query: Mapping[str, str]) -> AsyncIterator[str]:
        loop, events, gone = asyncio.get_running_loop(), asyncio.Queue[tuple[str, object]](), False

        def report(progress: dict[str, str]) -> None:
            if gone:
                raise LeftError
            if progress:
                loop.call_soon_threadsafe(events.put_nowait, ("progress", progress))

        def work() -> None:
            try:
                report({})
                event = ("done", self.ask("search", read_form(FORMS["search"], query), report).facts())
            except LeftError:
                return
            except MISTAKES as error:
                event = ("failed", _describe(error, "search"))
            loop.call_soon_threadsafe(events.put_nowait, event)

        self.searches.submit(work)
        try:
            while True:
                name, value = await events.get()
                yield f"event: {name}\ndata: {msgspec.json.encode(to_plain_json(value)).decode()}\n\n"
                if name != "progress":
                    return
        finally:
            gone = True


def _encode(answer: AppAnswer) -> bytes:
    return msgspec.json.encode(to_plain_json(answer.facts()))


async def _run(workers: Workers, work: Callable[[], Any]) -> Any:
    return await asyncio.wrap_future(workers.submit(work))


def _read_predict(query: Mapping[str, str]) -> FormChoices:
    return read_form(FORMS["predict"], query)


def _mistake(error: BaseException, form: str = "predict") -> Response:
    return JSONResponse(_describe(error, form), 400)


def _describe(error: BaseException, form: str) -> FactDict:
    """Return an error in the words of a form."""
    return {"error": name_fields(FORMS.get(form, PREDICT), message(str(error) or type(error).__name__))}


class RefusedError(Exception):
    """A request that is refused, with the reason."""

    def __init__(self, status: int, why: str) -> None:
        super().__init__(why)
        self.status, self.why = status, why


class ImpatientProtocol(H11Protocol):  # type: ignore[misc]
    """A connection that is closed if it has made no request within some seconds."""

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self.loop.call_later(FIRST_REQUEST_S, self._close_without_request)

    def _close_without_request(self) -> None:
        if self.cycle is None:
            self.transport.close()


class Guard:
    """A wrapper of *app* that checks Host, Origin, token and size, and removes the token from the path."""

    def __init__(self, app: App, token: str, hosts: frozenset[str], most_bytes: int) -> None:
        self.app, self.token, self.hosts, self.most_bytes = app, token, hosts, most_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        if scope["type"] != "http":
            return
        try:
            path = self._check(scope)
        except RefusedError as refused:
            await _refuse(refused)(scope, receive, send)
            return
        inner = {**scope, "path": path, "raw_path": path.encode(), "root_path": ""}
        begun = False

        async def send_headers(message: Message) -> None:
            nonlocal begun
            if message["type"] == "http.response.start":
                begun, headers = True, MutableHeaders(scope=message)
                for name, value in {**HEADERS, "content-security-policy": POLICY}.items():
                    headers.setdefault(name, value)
            await send(message)

        try:
            await self.app(inner, self._limit(receive), send_headers)
        except RefusedError as refused:
            if begun:
                raise
            await _refuse(refused)(scope, receive, send)

    def _check(self, scope: Scope) -> str:
        """Return the path after the token; raise a RefusedError if the request is not allowed."""
        headers = Headers(scope=scope)
        if any(len(headers.getlist(name)) > 1 for name in ("host", "origin", "content-length")):
            raise RefusedError(400, "a header occurs twice")
        host = headers.get("host", "").lower()
        if host not in self.hosts:
            raise RefusedError(421, "unknown host: use the URL that stepcast serve printed")
        origin = headers.get("origin", f"http://{host}")
        if origin.lower() != f"http://{host}" or not {*headers.getlist("sec-fetch-site")} <= {"none", "same-origin"}:
            raise RefusedError(403, "requests of other pages are refused")
        if scope["method"] not in ("GET", "HEAD", "POST"):
            raise RefusedError(405, "only GET and POST are allowed")
        if scope["method"] == "POST" and "origin" not in headers:
            raise RefusedError(403, "a POST request needs an Origin")
        if len(scope.get("query_string", b"")) > MOST_QUERY_BYTES:
            raise RefusedError(414, "the request is too long")
        length = headers.get("content-length", "0")
        if not length.isdecimal() or int(length) > self.most_bytes:
            raise self._too_large()
        _, token, *rest = [*scope["path"].split("/", 2), ""] if scope["path"].startswith("/") else ("", "")
        if not hmac.compare_digest(token.encode(), self.token.encode()):
            raise RefusedError(403, "the URL lacks its token: use the one that stepcast serve printed")
        return f"/{rest[0]}"

    def _too_large(self) -> RefusedError:
        limit = f"{self.most_bytes // 2**20:,} MiB"
        return RefusedError(413, f"more than {limit} cannot be uploaded; use the command line")

    def _limit(self, receive: Receive) -> Receive:
        """Return *receive* with a limit on the size of the body, whatever its header says."""
        taken = 0

        async def receive_limited() -> Message:
            nonlocal taken
            message = await receive()
            taken += len(message.get("body", b""))
            if taken > self.most_bytes:
                raise self._too_large()
            return message

        return receive_limited


def _refuse(refused: RefusedError) -> Response:
    # A body that is not read cannot be followed by another request.
    return PlainTextResponse(f"stepcast: {refused.why}\n", refused.status, {"connection": "close", **HEADERS})
