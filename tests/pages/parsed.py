"""A page as a test reads it: its elements, its text, and what it would run or load."""

import base64
import hashlib
import json
from dataclasses import dataclass, field
from html.parser import HTMLParser
from typing import Any

VOID = {"meta", "link", "input", "br", "hr"}
LOADS = {"src", "href", "srcset", "action", "data", "poster", "formaction", "background", "xlink:href"}


@dataclass
class Parsed(HTMLParser):
    """Raises where elements do not close in the order in which they were opened."""

    elements: list[tuple[str, dict[str, str | None]]] = field(default_factory=list)
    words: list[str] = field(default_factory=list)
    scripts: list[tuple[dict[str, str | None], str]] = field(default_factory=list)
    styles: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open[-1:] == [tag], f"</{tag}> within {self.open[-3:]}"
        self.open.pop()

    def handle_data(self, data: str) -> None:
        match self.open[-1:]:
            case ["script"]:
                self.scripts.append((self.elements[-1][1], data))
            case ["style"]:
                self.styles.append(data)
            case _:
                self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())

    def block(self, key: str) -> Any:
        """What a data block holds."""
        return next(json.loads(data) for attributes, data in self.scripts if attributes.get("id") == key)


def parsed(data: bytes) -> Parsed:
    page = Parsed()
    page.feed(data.decode())
    page.close()
    assert not page.open
    return page


def digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def assert_safe(data: bytes) -> Parsed:
    """A page runs and shows what its policy names, loads nothing, and holds no text that is more than text."""
    page = parsed(data)
    policies = [a["content"] for tag, a in page.elements if tag == "meta" and a.get("http-equiv")]
    assert len(policies) == 1
    policy = policies[0] or ""
    run = [text for attributes, text in page.scripts if attributes.get("type") is None]
    assert len(run) == 1
    assert len(page.styles) == 1
    assert f"script-src {digest(run[0])};" in policy
    assert f"style-src {digest(page.styles[0])};" in policy
    assert policy.startswith("default-src 'none'")
    assert "unsafe" not in policy
    allowed = {
        "html",
        "head",
        "body",
        "meta",
        "link",
        "title",
        "style",
        "script",
        "svg",
        "rect",
        "line",
        "circle",
        "polygon",
        "text",
    }
    allowed |= {
        "a",
        "aside",
        "button",
        "canvas",
        "caption",
        "code",
        "dd",
        "details",
        "div",
        "dl",
        "dt",
        "figure",
        "footer",
        "h1",
        "h2",
    }
    allowed |= {
        "header",
        "input",
        "label",
        "li",
        "main",
        "nav",
        "ol",
        "output",
        "p",
        "pre",
        "section",
        "small",
        "span",
        "strong",
        "summary",
    }
    allowed |= {"abbr", "table", "tbody", "td", "th", "thead", "tr", "ul"}
    for tag, attributes in page.elements:
        assert tag in allowed, f"<{tag}> came out of a text"
        for name, value in attributes.items():
            assert not name.startswith("on"), f"{tag} {name}"
            assert name != "style", f"{tag} has a style of its own, which the policy forbids"
            if name in LOADS:
                assert (value or "").startswith(("#", "data:,", "./")), f"{tag} {name}={value}"
    assert page.scripts[-1][1] == run[0]
    return page
