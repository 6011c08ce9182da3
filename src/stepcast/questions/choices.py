"""A choice of a question, declared once: how it is read, explained, named elsewhere and written back.

The fields of a question carry a Choice in their annotations. The command line, the keywords of Python
functions, saved runs, sweeps and printed commands all follow from it.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from stepcast.questions.numbers import ValueSpellingError


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """How one choice is asked for; its name and its default are those of the question's field."""

    help: str = ""
    # The heading under which the help lists it; verbs place a choice without one themselves.
    group: str = ""
    metavar: str = ""
    read: Callable[[str], Any] = str
    values: tuple[str, ...] = ()
    # A flag that can also be denied: --NAME and --no-NAME.
    deniable: bool = False
    # Its other names, separated by blanks.
    aliases: str = ""
    # Value -> names of flags that mean it, separated by blanks.
    flags: Mapping[str, str] = field(default_factory=dict)
    # The field of a Strategy or a Framework that it sets, what a value means there, and how that is written.
    sets: str = ""
    means: Callable[[Any], Any] = lambda value: value
    write: Callable[[Any], str] = str


def option_of(name: str) -> str:
    """Return the option of a command line that sets the choice *name*."""
    return f"--{name.replace('_', '-')}"


def read_choice(name: str, choice: Choice, default: object, value: object) -> Any:
    """Return *value*, text or a Python value, as the question holds it; raise a ValueError that names it."""
    if choice.deniable or default is False:
        if isinstance(value, bool):
            return value
        raise ValueError(f"{name}: expected True or False, not {value!r}")
    if isinstance(value, bool):
        raise ValueError(f"{name}: expected a value, not {value!r}")
    if default == ():
        return tuple(value) if isinstance(value, list | tuple) else (str(value),)
    text = ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
    try:
        found = choice.read(text)
    except ValueSpellingError as error:
        raise ValueError(f"{name}: {error}") from None
    if choice.values and found not in choice.values:
        from difflib import get_close_matches

        near = get_close_matches(str(found), choice.values, n=2)
        hint = f"did you mean {' or '.join(near)}?" if near else f"expected one of {', '.join(choice.values)}"
        raise ValueError(f"{name}: {found!r} is not known; {hint}")
    return found


def invert_words(words: Mapping[str, str]) -> dict[str, str]:
    """Return a mapping from each of the words, which blanks separate, to its key."""
    return {other: ours for ours, others in words.items() for other in others.split()}


def read_word(synonyms: Mapping[str, str]) -> Callable[[str], str]:
    """Return a reader of words in any letter case, with *synonyms* of our words, separated by blanks."""
    ours = invert_words(synonyms)

    def read(text: str) -> str:
        plain = plain_word(text)
        return ours.get(plain, plain)

    read.__name__ = "word"
    return read


def plain_word(text: str) -> str:
    return text.strip().lower().replace("_", "-").replace(" ", "-")


read_precision = read_word(
    {
        "bf16": "bfloat16 bf-16 brain-float bf16-mixed",
        "fp16": "float16 fp16-mixed half 16",
        "fp32": "float32 float single full 32",
        "fp8": "float8 e4m3 fp8-hybrid hybrid",
        "nvfp4": "fp4",
        "autocast-bf16": "amp autocast",
    }
)
read_schedule = read_word(
    {
        "interleaved": "1f1b-interleaved interleaved-1f1b interleaved1f1b vpp",
        "zb-h1": "zero-bubble zb zbh1",
        "zb-h2": "zbh2",
        "zb-v": "zbv zbvzerobubble",
        "dualpipe": "dual-pipe",
        "gpipe": "afab fill-drain",
    }
)
_read_sharding_name = read_word(
    {
        "fsdp": "fsdp2 fsdp1 full-shard",
        "zero-2": "shard-grad-op optim-grads",
        "hybrid-fsdp": "hybrid-shard hsdp",
        "none": "no-shard no off ddp 0",
        "zero-1": "optim distributed-optimizer",
        "zero-3": "optim-grads-params",
    }
)
RECOMPUTES = invert_words(
    {"none": "no off false never", "full": "yes on true all uniform", "selective": "attention core-attn core_attn"}
)
ZERO_STAGE = re.compile(r"(?:zero|stage|zero-stage|z)?-?([123])")


def read_sharding(text: str) -> str:
    """Read ``ZeRO-3``, ``zero3``, ``stage 3`` and ``3`` as one word."""
    stage = ZERO_STAGE.fullmatch(plain_word(text))
    return f"zero-{stage[1]}" if stage else _read_sharding_name(text)


def read_recompute(text: str) -> str:
    """Read kinds in any letter case; the text after a colon is left as it is."""
    kind, colon, rest = text.strip().partition(":")
    plain = kind.lower()
    return RECOMPUTES.get(plain, plain) + colon + rest
