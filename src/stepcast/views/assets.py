"""The style and the program that every page holds, and the digests by which its policy knows them."""

import base64
import hashlib
from functools import cache
from importlib.resources import files


@cache
def asset(name: str) -> str:
    """A file of this package as text."""
    return files("stepcast.views").joinpath("assets", name).read_text("utf-8")


@cache
def digest(name: str) -> str:
    """As a Content-Security-Policy names what a page holds within itself."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(asset(name).encode()).digest()).decode()}'"


@cache
def policy() -> str:
    """What a page may do: run its own program and show its own style, and nothing beyond itself."""
    return (
        f"default-src 'none'; script-src {digest('page.js')}; style-src {digest('page.css')}; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )
