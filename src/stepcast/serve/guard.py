"""Access control of the app: every request is checked here first.

The app answers its own page on this machine. It refuses pages of other sites (Origin and Sec-Fetch-Site), names
that were made to point here (Host), requests without the token of its URL, and requests that are too large.
"""

import asyncio
import hmac
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

Scope = MutableMapping[str, Any]
Message = Scope
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

MOST_QUERY_BYTES = 16_384
FIRST_REQUEST_S = 5.0  # from the connection to the end of the headers of its first request
HEADERS = (
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"x-frame-options", b"DENY"),
    (b"cache-control", b"no-store"),
)
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


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
            await _refuse(send, refused)
            return
        inner = {**scope, "path": path, "raw_path": path.encode(), "root_path": ""}
        begun = False

        async def send_headers(message: Message) -> None:
            nonlocal begun
            if message["type"] == "http.response.start":
                begun = True
                own = {name for name, _ in message["headers"]}
                policy = (b"content-security-policy", POLICY.encode())
                added = [each for each in (*HEADERS, policy) if each[0] not in own]
                message = {**message, "headers": [*message["headers"], *added]}
            await send(message)

        try:
            await self.app(inner, self._limit(receive), send_headers)
        except RefusedError as refused:
            if begun:
                raise
            await _refuse(send, refused)

    def _check(self, scope: Scope) -> str:
        """Return the path after the token; raise a RefusedError if the request is not allowed."""
        headers: dict[bytes, bytes] = {}
        for name, value in scope["headers"]:
            if name in headers and name in (b"host", b"origin", b"content-length"):
                raise RefusedError(400, "a header occurs twice")
            headers[name] = value
        host = headers.get(b"host", b"").decode("latin-1").lower()
        if host not in self.hosts:
            raise RefusedError(421, "unknown host: use the URL that stepcast serve printed")
        origin = headers.get(b"origin")
        if origin is not None and origin.decode("latin-1").lower() != f"http://{host}":
            raise RefusedError(403, "requests of other pages are refused")
        if headers.get(b"sec-fetch-site", b"none") not in (b"none", b"same-origin"):
            raise RefusedError(403, "requests of other pages are refused")
        if scope["method"] not in ("GET", "HEAD", "POST"):
            raise RefusedError(405, "only GET and POST are allowed")
        if scope["method"] == "POST" and origin is None:
            raise RefusedError(403, "a POST request needs an Origin")
        if len(scope.get("query_string", b"")) > MOST_QUERY_BYTES:
            raise RefusedError(414, "the request is too long")
        length = headers.get(b"content-length", b"0")
        if not length.isdigit() or int(length) > self.most_bytes:
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


async def _refuse(send: Send, refused: RefusedError) -> None:
    body = f"stepcast: {refused.why}\n".encode()
    kind = (b"content-type", b"text/plain; charset=utf-8")
    # A body that is not read cannot be followed by another request.
    headers = [kind, (b"content-length", str(len(body)).encode()), (b"connection", b"close"), *HEADERS]
    await send({"type": "http.response.start", "status": refused.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
