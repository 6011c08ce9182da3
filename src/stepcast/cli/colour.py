"""Colour on a terminal: text as it is printed, line by line, in the few styles that help to find things.

Colours carry nothing that the words do not say. NO_COLOR, --plain and terminals that cannot leave them out.
"""

import os
import re
from typing import TextIO

RESET = "\033[0m"
BOLD, DIM, RED, GREEN, YELLOW, BLUE, CYAN = (f"\033[{code}m" for code in (1, 2, 31, 32, 33, 34, 36))
FULL = "\u2588"
RULES: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern, re.MULTILINE), style)
    for pattern, style in (
        (r"^(?:stepcast: )", RED),
        (r"^(?:warning: |incomplete\b)", YELLOW),
        (r"^(?:defaults used:|note: )", DIM),
        (r"^-+(?:  -+)*$", DIM),
        (r"\bDOES NOT FIT\b", BOLD + RED),
        (r"(?<=: )fits(?= \(|$)", GREEN),
        (r"(?<=^step  )[ ]*\S.*$", BOLD),
        (r"(?<=^takes  )[ ]*\S.*$", BOLD),
        (r"^wrote .*$", CYAN),
    )
)
BARS = re.compile(r"(?<=[ ]{2})#+$", re.MULTILINE)


def wants_colour(stream: TextIO, plain: bool) -> bool:
    """Whether a person looks at *stream* who did not ask to be spared."""
    environment = os.environ
    told_not = plain or bool(environment.get("NO_COLOR")) or environment.get("TERM") == "dumb"
    return not told_not and stream.isatty()


def painted(text: str, blocks: bool) -> str:
    """*text* with its styles; bars are drawn with *blocks* where the terminal has them."""
    for pattern, style in RULES:
        text = pattern.sub(lambda found, style=style: f"{style}{found[0]}{RESET}", text)  # type: ignore[misc]
    full = FULL if blocks else "#"
    return BARS.sub(lambda found: f"{BLUE}{full * len(found[0])}{RESET}", text)
