"""The routes of the app. What they answer is worked out elsewhere, in threads that take turns."""

import asyncio
import json
import re
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from queue import SimpleQueue
from threading import Lock, Thread
from time import sleep
from typing import Any, Protocol

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from stepcast.serve.fields import PREDICT, SEARCH, FieldError, command_words
from stepcast.serve.guard import Guard, RefusedError
from stepcast.serve.shell import shell
from stepcast.views.document import Page, asset, body_of, policy, render
from stepcast.views.text import message

Told = Callable[[dict[str, Any]], None]
Rest = Callable[[], None]
RESTS_S = 0.002
MOST_FILES = 512
KEPT_ANSWERS = 512
NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9._ -]+")
LONGEST_NAME = 80
# What goes wrong with what a user gave, as in the command line.
MISTAKES = (ValueError, OSError, MemoryError, ArithmeticError, RuntimeWarning, RecursionError)


@dataclass(frozen=True, slots=True)
class Answer:
    """A page, and what is kept of it for comparisons."""

    page: Page
    summary: Mapping[str, Any]
    status: int = 200

    def facts(self) -> dict[str, Any]:
        return {"html": str(body_of(self.page)), "command": self.page.about.command, "summary": self.summary}


class Answers(Protocol):
    """The verbs behind the app: words of a command line in, answers out."""

    def predict(self, words: Sequence[str], rest: Rest | None) -> Answer:
        """All of it where *rest* is given, which is called between its parts; else what is known at once."""
        ...

    def search(self, words: Sequence[str], told: Told) -> Answer:
        """*told* hears how far it is, of nothing too, and ends it by a KeyboardInterrupt."""
        ...

    def compare(self, first: Sequence[str], second: Sequence[str]) -> Answer: ...

    def analyze(self, given: Sequence[tuple[str, bytes]], cluster: str | None) -> Answer: ...


class Workers:
    """Threads that do what they are given in turn, and end with the program: none waits for a long search."""

    def __init__(self, count: int) -> None:
        self.given: SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = SimpleQueue()
        for _ in range(count):
            Thread(target=self._work, daemon=True).start()

    def _work(self) -> None:
        while True:
            future, work = self.given.get()
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(work())
            except BaseException as error:  # told to who asked
                future.set_exception(error)

    def submit(self, work: Callable[[], Any]) -> Future[Any]:
        future: Future[Any] = Future()
        self.given.put((future, work))
        return future


class Turns:
    """One computes at a time, since prices are shared; what takes long lets those go first that wait."""

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
        """For one whose turn it is."""
        while self.waiting:
            self.lock.release()
            sleep(RESTS_S)
            self.lock.acquire()


def make_app(answers: Answers, token: str, hosts: frozenset[str], most_bytes: int) -> Guard:
    """The app behind its guard."""
    routes = _Routes(answers)
    inner = Starlette(
        routes=[
            Route("/", routes.home),
            Route("/answer", routes.answer),
            Route("/whole", routes.whole),
            Route("/page", routes.page),
            Route("/compare", routes.compare),
            Route("/search", routes.search),
            Route("/analyze", routes.analyze, methods=["POST"]),
            *(Route(f"/{name}", routes.own, name=name) for name in OWN),
        ]
    )
    return Guard(inner, token, hosts, most_bytes)


OWN = {"page.css": "text/css", "page.js": "text/javascript", "app.css": "text/css", "app.js": "text/javascript"}


@lru_cache
def _own(name: str) -> str:
    if name.startswith("page."):
        return asset(name)
    return files("stepcast.serve").joinpath("assets", name).read_text("utf-8")


class _Routes:
    def __init__(self, answers: Answers) -> None:
        self.answers = answers
        self.turns = Turns()
        self.quick, self.slow = Workers(2), Workers(2)
        self.predicted = lru_cache(KEPT_ANSWERS)(self._predicted)

    def _predicted(self, words: tuple[str, ...]) -> bytes:
        with self.turns:
            return _encoded(self.answers.predict(words, None))

    def _whole(self, words: tuple[str, ...]) -> Answer:
        with self.turns:
            return self.answers.predict(words, self.turns.rest)

    async def home(self, request: Request) -> Response:
        return HTMLResponse(shell())

    async def own(self, request: Request) -> Response:
        name = request.url.path.rpartition("/")[2]
        return Response(_own(name), media_type=OWN[name])

    async def answer(self, request: Request) -> Response:
        """The live one: no timeline, and what was asked before is known."""
        return await self._answered(lambda: self.predicted(_words("predict", request)), self.quick)

    async def whole(self, request: Request) -> Response:
        """The same with its timeline and what to change, for one who stays."""

        return await self._answered(lambda: _encoded(self._whole(_words("predict", request))), self.slow)

    async def page(self, request: Request) -> Response:
        """The file that ``--html`` writes."""
        try:
            words = _words("predict", request)
            made = await _run(self.slow, lambda: render(self._whole(words).page))
        except MISTAKES as error:
            return _mistake(error)
        return Response(made, media_type="text/html", headers={"content-security-policy": policy()})

    async def compare(self, request: Request) -> Response:
        def found() -> bytes:
            sides = [
                _words("predict", dict(_pairs(request.query_params.get(name, "")))) for name in ("first", "second")
            ]
            with self.turns:
                return _encoded(self.answers.compare(*sides))

        return await self._answered(found, self.quick)

    async def analyze(self, request: Request) -> Response:
        try:
            data = await request.body()
        except RefusedError as refused:
            return JSONResponse({"error": refused.why}, refused.status, {"connection": "close"})
        header, cluster = request.headers.get("x-files", ""), request.query_params.get("cluster") or None

        def found() -> bytes:
            return _encoded(self.answers.analyze(_files(header, data), cluster))

        return await self._answered(found, self.slow)

    async def _answered(self, found: Callable[[], bytes], pool: Workers) -> Response:
        try:
            return Response(await _run(pool, found), media_type="application/json")
        except MISTAKES as error:
            return _mistake(error)

    async def search(self, request: Request) -> Response:
        """Events: how far it is, then what was found; who goes away ends it."""
        try:
            words = _words("search", request)
        except FieldError as error:
            return _mistake(error)
        return StreamingResponse(self._searched(words), media_type="text/event-stream")

    async def _searched(self, words: Sequence[str]) -> AsyncIterator[str]:
        loop, events, gone = asyncio.get_running_loop(), asyncio.Queue[tuple[str, Any]](), False

        def told(progress: dict[str, Any]) -> None:
            if gone:
                raise KeyboardInterrupt
            if progress:
                loop.call_soon_threadsafe(events.put_nowait, ("progress", progress))

        def work() -> None:
            try:
                event = ("done", self.answers.search(words, told).facts())
            except KeyboardInterrupt:
                return
            except MISTAKES as error:
                event = ("failed", {"error": message(str(error))})
            loop.call_soon_threadsafe(events.put_nowait, event)

        self.slow.submit(work)
        try:
            while True:
                name, value = await events.get()
                yield f"event: {name}\ndata: {msgspec.json.encode(_plain(value)).decode()}\n\n"
                if name != "progress":
                    return
        finally:
            gone = True


def _encoded(answer: Answer) -> bytes:
    return msgspec.json.encode(_plain(answer.facts()))


async def _run(workers: Workers, work: Callable[[], Any]) -> Any:
    return await asyncio.wrap_future(workers.submit(work))


def _words(verb: str, given: Request | Mapping[str, str]) -> tuple[str, ...]:
    query = dict(given.query_params) if isinstance(given, Request) else given
    return tuple(command_words(verb, PREDICT if verb == "predict" else SEARCH, query))


def _pairs(text: str) -> list[tuple[str, str]]:
    """``a=1&b=2``; values are names and numbers, of which nothing needs to be escaped."""
    return [(name, value) for name, _, value in (each.partition("=") for each in text.split("&") if each)]


def _files(header: str, data: bytes) -> list[tuple[str, bytes]]:
    """The files of a request, which follow each other in it; names are words to show and never paths."""
    try:
        listed = json.loads(header)
        sizes = [int(each["size"]) for each in listed]
        names = [str(each["name"]) for each in listed]
    except (ValueError, KeyError, TypeError):
        raise FieldError("the request does not say which files it holds") from None
    if not 1 <= len(sizes) <= MOST_FILES or min(sizes) < 0 or sum(sizes) != len(data):
        raise FieldError(f"the request holds no files, more than {MOST_FILES}, or others than it says")
    found, at = [], 0
    for name, size in zip(names, sizes, strict=True):
        found.append((shown_name(name), data[at : at + size]))
        at += size
    return found


def shown_name(name: str) -> str:
    """The last part of a file's name, in characters that mean nothing to anybody."""
    last = name.replace("\\", "/").rpartition("/")[2]
    return NOT_IN_NAMES.sub("_", last).strip(". ")[-LONGEST_NAME:] or "file"


def _mistake(error: BaseException) -> Response:
    text = str(error) or type(error).__name__
    return JSONResponse({"error": message(text)}, 400)


def _plain(value: Any) -> Any:
    """What JSON can say, text that is none spelt out."""
    if isinstance(value, str):
        return value if value.isascii() else value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, Mapping):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return value.tolist() if hasattr(value, "tolist") else value
