"""``stepcast serve``: the local app, on this machine alone unless told otherwise."""

import argparse
import asyncio
import gc
import re
import secrets
import sys
import threading
import warnings
from collections.abc import Sequence
from typing import Any

from stepcast.cli.loaded import loaded
from stepcast.cli.options import add_options
from stepcast.questions.numbers import count

PORT = 8321
LOOPBACK = ("127.0.0.1", "localhost", "::1")
MOST_MIB = 64


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_options(
        parser,
        f"""
        --port N          default {PORT}; 0: any free one
        --host ADDRESS    address to listen at (default 127.0.0.1: this machine alone)
        --expose          listen at an address that other machines reach; who knows the token may ask
        --name NAME ...   a name of this machine that browsers may use
        --max-upload MIB  largest trace to take (default {MOST_MIB} MiB)
        """,
        port={"type": count(0, 65535), "default": PORT},
        host="127.0.0.1",
        name=_name,
        max_upload={"type": count(1, 4096), "default": MOST_MIB},
    )


def _name(text: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9.-]{0,250}[A-Za-z0-9])?", text):
        raise argparse.ArgumentTypeError(f"expected the name of a machine, such as box.lan, not {text!r}")
    return text


class _Verbs:
    """The verbs, loaded when one is asked for: the server listens before."""

    def __getattr__(self, name: str) -> Any:
        return getattr(loaded("cli.served:verbs")(), name)


def run(args: argparse.Namespace) -> int:
    if args.host not in LOOPBACK and not args.expose:
        raise ValueError(f"--host {args.host} is reached from other machines; say so with --expose")
    try:
        import uvicorn
    except ImportError:
        raise ValueError("serve needs the extra web: pip install 'stepcast[web]'") from None
    from stepcast.serve.app import make_app

    gc.enable()  # a command has no use for it, a server has
    warnings.simplefilter("error", RuntimeWarning)
    token = secrets.token_urlsafe(24)

    verbs: Any = _Verbs()
    threading.Thread(target=verbs.warm, daemon=True).start()
    guard = make_app(verbs, token, frozenset(), args.max_upload * 2**20)
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
        h11_max_incomplete_event_size=65_536,
    )
    server = uvicorn.Server(config)

    async def told() -> None:
        while not server.started:
            await asyncio.sleep(0.02)
        port = server.servers[0].sockets[0].getsockname()[1]
        guard.hosts = _hosts(args.host, args.name, port)
        shown = args.host if args.host in LOOPBACK else (args.name or [args.host])[0]
        print(f"open http://{f'[{shown}]' if ':' in shown else shown}:{port}/{token}/", flush=True)
        print("the address holds a token: who has it may ask; Ctrl-C ends it", file=sys.stderr)

    async def serve() -> None:
        telling = asyncio.create_task(told())
        await server.serve()
        await telling

    try:
        asyncio.run(serve())
    except SystemExit:  # what uvicorn does where the port is taken
        raise ValueError(f"port {args.port} of {args.host} cannot be listened at; try --port 0") from None
    return 0


def _hosts(host: str, names: Sequence[str], port: int) -> frozenset[str]:
    """What a browser may call this server."""
    known = [*(LOOPBACK if host in LOOPBACK else (host,)), *names]
    return frozenset(f"{f'[{name}]' if ':' in name else name}:{port}".lower() for name in known)
