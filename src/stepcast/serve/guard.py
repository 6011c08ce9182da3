"""Who may ask, and how much: every request passes here before anything looks at it.

The app answers its own page on this machine. A page of somebody else must not reach it (its Origin, and the
browser's own word for where a request comes from), nor a name that was made to point here (its Host), nor one
who does not know the token that the address holds.
"""

import hmac
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

MOST_QUERY_BYTES = 16_384
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
    """A request that is not answered, and why."""

    def __init__(self, status: int, why: str) -> None:
        super().__init__(why)
        self.status, self.why = status, why


class Guard:
    """Stands before *app*: checks Host, Origin, token and size, and takes the token out of the path."""

    def __init__(self, app: App, token: str, hosts: frozenset[str], most_bytes: int) -> None:
        self.app, self.token, self.hosts, self.most_bytes = app, token, hosts, most_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        if scope["type"] != "http":
            return
        try:
            path = self._checked(scope)
        except RefusedError as refused:
            await _refuse(send, refused)
            return
        inner = {**scope, "path": path, "raw_path": path.encode(), "root_path": ""}
        begun = False

        async def sent(message: Message) -> None:
            nonlocal begun
            if message["type"] == "http.response.start":
                begun = True
                own = {name for name, _ in message["headers"]}
                policy = (b"content-security-policy", POLICY.encode())
                added = [each for each in (*HEADERS, policy) if each[0] not in own]
                message = {**message, "headers": [*message["headers"], *added]}
            await send(message)

        try:
            await self.app(inner, self._limited(receive), sent)
        except RefusedError as refused:
            if begun:
                raise
            await _refuse(send, refused)

    def _checked(self, scope: Scope) -> str:
        """The path behind the token."""
        headers: dict[bytes, bytes] = {}
        for name, value in scope["headers"]:
            if name in headers and name in (b"host", b"origin", b"content-length"):
                raise RefusedError(400, "a header is there twice")
            headers[name] = value
        host = headers.get(b"host", b"").decode("latin-1").lower()
        if host not in self.hosts:
            raise RefusedError(421, "this address is not answered here: use the one that stepcast serve printed")
        origin = headers.get(b"origin")
        if origin is not None and origin.decode("latin-1").lower() != f"http://{host}":
            raise RefusedError(403, "requests of other pages are not answered")
        if headers.get(b"sec-fetch-site", b"none") not in (b"none", b"same-origin"):
            raise RefusedError(403, "requests of other pages are not answered")
        if scope["method"] not in ("GET", "HEAD", "POST"):
            raise RefusedError(405, "only GET and POST are answered")
        if scope["method"] == "POST" and origin is None:
            raise RefusedError(403, "a POST says where it comes from")
        if len(scope.get("query_string", b"")) > MOST_QUERY_BYTES:
            raise RefusedError(414, "the request is too long")
        length = headers.get(b"content-length", b"0")
        if not length.isdigit() or int(length) > self.most_bytes:
            raise RefusedError(413, f"more than {self.most_bytes // 2**20:,} MiB are not taken; use the command line")
        _, token, *rest = scope["path"].split("/", 2)
        if not hmac.compare_digest(token.encode(), self.token.encode()):
            raise RefusedError(403, "the address lacks its token: use the one that stepcast serve printed")
        return "/" + (rest[0] if rest else "")

    def _limited(self, receive: Receive) -> Receive:
        """*receive* that gives up on a body that is larger than it may be, whatever its header says."""
        taken = 0

        async def received() -> Message:
            nonlocal taken
            message = await receive()
            taken += len(message.get("body", b""))
            if taken > self.most_bytes:
                raise RefusedError(
                    413, f"more than {self.most_bytes // 2**20:,} MiB are not taken; use the command line"
                )
            return message

        return received


async def _refuse(send: Send, refused: RefusedError) -> None:
    body = f"stepcast: {refused.why}\n".encode()
    kind = (b"content-type", b"text/plain; charset=utf-8")
    # A body that is not read cannot be followed by another request.
    headers = [kind, (b"content-length", str(len(body)).encode()), (b"connection", b"close"), *HEADERS]
    await send({"type": "http.response.start", "status": refused.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
