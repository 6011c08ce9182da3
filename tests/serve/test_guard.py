"""The guard of the app by itself: each check, at its limit and one beyond it."""

import asyncio
from typing import Any

import pytest

pytest.importorskip("uvicorn", reason="needs the extra web: pip install 'stepcast[web]'")

from stepcast.serve.app import MOST_QUERY_BYTES, Guard, ImpatientProtocol, RefusedError

HOST, TOKEN, MOST_BYTES = "127.0.0.1:8321", "t" * 32, 2 * 2**20
OWN = (b"host", HOST.encode())
ORIGIN = (b"origin", f"http://{HOST}".encode())


def ask(
    *headers: tuple[bytes, bytes], path: str = f"/{TOKEN}/x", method: str = "GET", query: bytes = b"", body: int = 0
) -> tuple[int, list[dict[str, Any]], list[str]]:
    """Return the status, the messages sent, and the paths that reached the app."""
    sent: list[dict[str, Any]] = []
    reached: list[str] = []
    left = [body]

    async def receive() -> dict[str, Any]:
        piece = min(left[0], 2**20)
        left[0] -= piece
        return {"type": "http.request", "body": b"x" * piece, "more_body": left[0] > 0}

    async def send(message: Any) -> None:
        sent.append(dict(message))

    async def app(scope: Any, receive: Any, send: Any) -> None:
        reached.append(scope["path"])
        while (await receive()).get("more_body"):
            pass
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    guard = Guard(app, TOKEN, frozenset({HOST}), MOST_BYTES)
    scope = {"type": "http", "headers": list(headers), "method": method, "path": path, "query_string": query}
    asyncio.run(guard(scope, receive, send))
    return sent[0]["status"], sent, reached


def test_a_good_request_passes_without_its_token() -> None:
    status, _, reached = ask(OWN)
    assert (status, reached) == (200, ["/x"])
    assert ask(OWN, path=f"/{TOKEN}")[2] == ["/"]
    assert ask(OWN, path=f"/{TOKEN}/a/b/")[2] == ["/a/b/"]


@pytest.mark.parametrize("name", [b"host", b"origin", b"content-length"])
def test_a_header_that_decides_may_occur_once(name: bytes) -> None:
    values = {b"host": OWN[1], b"origin": ORIGIN[1], b"content-length": b"0"}
    rest = [] if name == b"host" else [OWN]
    assert ask(*rest, (name, values[name]))[0] == 200
    status, _, reached = ask(*rest, (name, values[name]), (name, values[name]))
    assert (status, reached) == (400, [])


def test_other_headers_may_occur_twice() -> None:
    assert ask(OWN, (b"accept", b"a"), (b"accept", b"b"))[0] == 200


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ([], 421),
        ([(b"host", b"evil:8321")], 421),
        ([OWN, (b"origin", b"http://evil")], 403),
        ([OWN, (b"origin", b"https://" + HOST.encode())], 403),
        ([OWN, (b"sec-fetch-site", b"cross-site")], 403),
        ([OWN, (b"sec-fetch-site", b"same-site")], 403),
        ([OWN, (b"sec-fetch-site", b"none")], 200),
        ([OWN, (b"sec-fetch-site", b"same-origin")], 200),
        ([OWN, ORIGIN], 200),
        ([OWN, (b"content-length", b"-1")], 413),
        ([OWN, (b"content-length", b"x")], 413),
    ],
)
def test_who_asks(headers: list[tuple[bytes, bytes]], status: int) -> None:
    assert ask(*headers)[0] == status


@pytest.mark.parametrize("method", ["PUT", "DELETE", "OPTIONS"])
def test_methods(method: str) -> None:
    assert ask(OWN, method=method)[0] == 405


def test_a_post_needs_an_origin() -> None:
    assert ask(OWN, method="POST")[0] == 403
    assert ask(OWN, ORIGIN, method="POST")[0] == 200
    assert ask(OWN, method="HEAD")[0] == 200


@pytest.mark.parametrize("path", ["/", "", "foo", "foo/bar", f"/{TOKEN}x/x", f"/{TOKEN[:-1]}/x", f"x/{TOKEN}/", "//"])
def test_a_path_without_the_token(path: str) -> None:
    status, sent, reached = ask(OWN, path=path)
    assert (status, reached) == (403, [])
    assert (b"x-content-type-options", b"nosniff") in sent[0]["headers"]
    assert (b"connection", b"close") in sent[0]["headers"]


def test_sizes_at_their_limits() -> None:
    assert ask(OWN, query=b"x" * MOST_QUERY_BYTES)[0] == 200
    assert ask(OWN, query=b"x" * (MOST_QUERY_BYTES + 1))[0] == 414
    assert ask(OWN, ORIGIN, (b"content-length", str(MOST_BYTES).encode()), method="POST", body=MOST_BYTES)[0] == 200
    assert ask(OWN, ORIGIN, (b"content-length", str(MOST_BYTES + 1).encode()), method="POST")[0] == 413


def test_a_body_that_hides_its_length_is_counted() -> None:
    assert ask(OWN, ORIGIN, method="POST", body=MOST_BYTES)[0] == 200
    status, sent, _ = ask(OWN, ORIGIN, method="POST", body=MOST_BYTES + 1)
    assert status == 413
    assert b"2 MiB" in sent[1]["body"]


def test_replies_have_the_headers_of_the_app_first() -> None:
    headers = dict(ask(OWN)[1][0]["headers"])
    assert headers[b"x-frame-options"] == b"DENY"
    assert b"default-src 'none'" in headers[b"content-security-policy"]


def test_an_error_of_the_app_after_it_began_is_its_own() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        raise RefusedError(413, "too late")

    async def send(message: Any) -> None: ...

    scope = {"type": "http", "headers": [OWN], "method": "GET", "path": f"/{TOKEN}/", "query_string": b""}
    with pytest.raises(RefusedError):
        asyncio.run(Guard(app, TOKEN, frozenset({HOST}), 1)(scope, send, send))  # type: ignore[arg-type]


class Transport:
    closed = False

    def close(self) -> None:
        self.closed = True


@pytest.mark.parametrize("cycle", [None, object()], ids=["silent", "asking"])
def test_only_a_connection_that_asked_nothing_is_closed(cycle: object) -> None:
    protocol, transport = ImpatientProtocol.__new__(ImpatientProtocol), Transport()
    protocol.cycle, protocol.transport = cycle, transport
    protocol._close_without_request()
    assert transport.closed is (cycle is None)
