"""``stepcast serve``: the local app, which other machines cannot reach by default."""

import argparse
import asyncio
import gc
import secrets
import sys
import threading
import warnings
from typing import Any

from stepcast.cli.documents import load_lazily

LOOPBACK = ("127.0.0.1", "localhost", "::1")


def _answer(verb: str, *given: object) -> Any:
    """Return the answer of a verb; verbs are loaded at the first request, after the server has started to listen."""
    return load_lazily(f"cli.served:{verb}")(*given)


def run(args: argparse.Namespace) -> int:
    if args.host not in LOOPBACK and not args.expose:
        raise ValueError(f"--host {args.host} can be reached from other machines; use --expose to allow that")
    try:
        import uvicorn
    except ImportError:
        raise ValueError("serve needs the extra web: pip install 'stepcast[web]'") from None
    from stepcast.serve.app import ImpatientProtocol, make_app

    gc.enable()  # commands disable it
    warnings.simplefilter("error", RuntimeWarning)
    token = secrets.token_urlsafe(24)

    threading.Thread(target=_answer, args=("warm",), daemon=True).start()
    guard = make_app(_answer, token, frozenset(), args.max_upload * 2**20)
    config = uvicorn.Config(
        guard,
        host=args.host,
        port=args.port,
        log_level="critical",
        access_log=False,
        server_header=False,
        date_header=False,
        timeout_keep_alive=30,
        timeout_graceful_shutdown=1,
        limit_concurrency=1024,
        http=ImpatientProtocol,
        ws="none",
        h11_max_incomplete_event_size=65_536,
    )
    server = uvicorn.Server(config)

    async def announce() -> None:
        while not server.started:
            await asyncio.sleep(0.02)
        port = server.servers[0].sockets[0].getsockname()[1]
        known = [*(LOOPBACK if args.host in LOOPBACK else (args.host,)), *args.name]
        guard.hosts = frozenset(f"{f'[{name}]' if ':' in name else name}:{port}".lower() for name in known)
        shown = args.host if args.host in LOOPBACK else (args.name or [args.host])[0]
        print(f"open http://{f'[{shown}]' if ':' in shown else shown}:{port}/{token}/", flush=True)
        print("anyone with this URL can use the app; Ctrl-C stops it", file=sys.stderr)

    async def serve() -> None:
        announcing = asyncio.create_task(announce())
        await server.serve()
        await announcing

    try:
        asyncio.run(serve())
    except SystemExit:  # raised by uvicorn if the port is taken
        raise ValueError(f"cannot listen on port {args.port} of {args.host}; try --port 0") from None
    return 0
