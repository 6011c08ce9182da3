"""Fields of the forms, and the choices that a form makes.

Requests reach the program only through these: a value is one of a list, or a whole number within limits. No text
of a request is used as a path or as an option.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache

from stepcast.frameworks.catalog import framework_names
from stepcast.goodput.operation import failure_names
from stepcast.hardware import cluster_names
from stepcast.ir.dataclass import dataclass
from stepcast.models.catalog import model_names
from stepcast.questions.choices import option_of
from stepcast.questions.question import CHOICES, PRECISIONS
from stepcast.questions.search import OBJECTIVES, RECOMPUTES
from stepcast.version import __version__
from stepcast.views.markup import Markup, explain, fill_template, join, tag

LONGEST_VALUE = 200
DECIMAL = re.compile(r"[0-9]{1,6}(\.[0-9]{1,4})?")
CURRENCIES = ("$", "EUR", "GBP", "CHF", "JPY", "CNY", "INR")
FormChoices = tuple[tuple[str, str], ...]
"""Names and values of the choices that a form makes."""


class FieldError(ValueError):
    """A form with a field or a value that it may not have."""


@dataclass(frozen=True, slots=True)
class Field:
    """One choice of a form: one of *choices*, or a number within *limits*; no value means the default."""

    name: str
    label: str
    choices: tuple[str, ...] = ()
    limits: tuple[int, int] = (1, 1)
    initial: str = ""
    powers: bool = False  # a slider of powers of two
    default: str = ""  # the value that a question has without this choice
    note: str = ""
    unit: str = ""  # appended to a number, such as B for billions
    decimals: bool = False
    long: bool = False  # a list that is searched by typing
    unset: str = "default"  # shown without a value

    def read(self, value: str) -> str:
        """Return *value* as a question reads it."""
        if self.choices:
            if value not in self.choices:
                raise FieldError(f"{self.label}: unrecognised value {value[:40]!r}")
            return value
        low, high = self.limits
        if self.decimals:
            if not DECIMAL.fullmatch(value) or not low <= float(value) <= high:
                raise FieldError(f"{self.label}: expected a number from {low:,} to {high:,}")
            return value
        if not (value.isascii() and value.isdigit() and len(value) <= 12) or not low <= int(value) <= high:
            raise FieldError(f"{self.label}: expected a whole number from {low:,} to {high:,}")
        return f"{int(value)}{self.unit}"


MODEL = Field("model", "Model", model_names(), initial="llama-3.1-70b", long=True)
CLUSTER = Field("cluster", "Cluster", cluster_names(), initial="dgx-h100")
FRAMEWORK = Field("framework", "Framework", framework_names(), initial="megatron-core")
GPUS = Field("gpus", "GPUs", limits=(1, 2**24), initial="64", powers=True)
BATCH = Field("global_batch", "Global batch", limits=(1, 10_000_000), initial="256", note="sequences per step")
SEQ = Field("seq", "Sequence length", limits=(1, 10_000_000), initial="4096", note="tokens")
DEGREES = {"tp": "Tensor parallel", "pp": "Pipeline parallel", "cp": "Context parallel", "ep": "Expert parallel"}
CHOSEN = (
    Field("precision", "Precision", PRECISIONS),
    Field("sharding", "Sharding", CHOICES["sharding"].values),
    Field("recompute", "Recompute", RECOMPUTES),
    Field("schedule", "Schedule", CHOICES["schedule"].values),
)
PREDICT: tuple[Field, ...] = (
    MODEL,
    CLUSTER,
    FRAMEWORK,
    GPUS,
    *(
        Field(name, label, limits=(1, 4096), initial={"tp": "8", "pp": "2"}.get(name, "1"), powers=True, default="1")
        for name, label in DEGREES.items()
    ),
    Field("vpp", "Virtual pipeline stages", limits=(1, 512), note="per rank (VPP)"),
    Field("micro_batch", "Micro-batch", limits=(1, 100_000), initial="1", powers=True, default="1"),
    BATCH,
    SEQ,
    *CHOSEN,
    Field("lora_rank", "LoRA rank", limits=(0, 4096), default="0", note="default: all weights are trained"),
    Field("base_weights", "Frozen weights", CHOICES["base_weights"].values, note="with LoRA"),
    Field("task", "Task", CHOICES["task"].values, note="of fine-tuning"),
)
# The files that are dropped: the cluster that a measured run used, and choices for a config.json.
DROPPED = (*PREDICT, Field("ran_on", "Cluster it ran on", cluster_names()))
SEARCH: tuple[Field, ...] = (
    MODEL,
    CLUSTER,
    FRAMEWORK,
    GPUS,
    BATCH,
    SEQ,
    Field("objective", "Minimise", OBJECTIVES, initial="step", default="step"),
    Field("top", "Strategies to rank", limits=(1, 50), initial="10", default="10"),
    # Restrictions: without them all values are searched.
    *(Field(name, label, limits=(1, 4096), unset="any") for name, label in DEGREES.items()),
    Field("micro_batch", "Micro-batch", limits=(1, 100_000), unset="any"),
    CHOSEN[0],
    *(replace(field, unset="any") for field in CHOSEN[1:]),
    Field("time", "Time limit", limits=(1, 3600), unit="s", note="seconds"),
)
PLAN: tuple[Field, ...] = (
    *PREDICT,
    Field("tokens", "Tokens", limits=(1, 1_000_000), initial="1000", unit="B", note="billions"),
    Field("price", "Price", limits=(0, 100_000), decimals=True, note="per GPU-hour; default: none"),
    Field("currency", "Currency", CURRENCIES, initial="$", default="$"),
    Field("failures", "Failures", (*failure_names(), "none")),
    Field("spares", "Spare nodes", limits=(0, 100_000)),
)
# Other values of a choice, which a comparison answers as well, follow it.
OTHERS = {"cluster": ("Cluster", cluster_names()), "framework": ("Framework", framework_names())}


def _with_others(field: Field) -> list[Field]:
    label, values = OTHERS.get(field.name, ("", ()))
    return [
        field,
        *(Field(f"{field.name}_{number}", f"{label} {number}", values, unset="none") for number in (2, 3) if label),
    ]


COMPARE: tuple[Field, ...] = tuple(
    every for field in PLAN if field.name not in ("currency", "spares") for every in _with_others(field)
)


def join_others(choices: FormChoices) -> dict[str, str]:
    """Return the choices of a comparison, with the values of one name joined by commas."""
    joined: dict[str, str] = {}
    for name, value in choices:
        plain = name.rstrip("0123456789").rstrip("_")
        joined[plain] = f"{joined[plain]},{value}" if plain in joined else value
    return joined


def read_form(fields: Sequence[Field], given: Mapping[str, str]) -> FormChoices:
    """Return the choices of a form; refuse unknown fields, unknown values and those beyond their limits."""
    known = {field.name: field for field in fields}
    for name, value in given.items():
        if name not in known:
            raise FieldError(f"the form has no field {name[:40]!r}")
        if len(value) > LONGEST_VALUE:
            raise FieldError(f"{known[name].label}: the value is too long")
    values = {name: given.get(name, "").strip() for name in known}
    return tuple(
        (name, known[name].read(value)) for name, value in values.items() if value and value != known[name].default
    )


def form_command(verb: str, choices: FormChoices) -> str:
    """Return the command that makes the same choices; their values need no quotes."""
    return " ".join(["stepcast", verb, *(f"{option_of(name)} {value}" for name, value in choices)])


# ---- the page of the app ------------------------------------------------------------------------------------

MOST_POWER = 14


@cache
def shell(template: str) -> str:
    """Return the page without an answer, from the *template* in the assets."""
    forms = {"predict": PREDICT, "search": SEARCH, "plan": PLAN, "alternatives": COMPARE}
    clusters = join(tag("option", name, value=name) for name in CLUSTER.choices)
    parts = {name: _form(name, fields) for name, fields in forms.items()}
    return f"<!doctype html>\n{fill_template(template, version=__version__, clusters=clusters, **parts)}\n"


def _form(verb: str, fields: tuple[Field, ...]) -> Markup:
    return tag("form", [_field(verb, field) for field in fields], id=f"form-{verb}", autocomplete="off")


def _field(verb: str, field: Field) -> Markup:
    key = f"{verb}-{field.name}"
    label = tag("label", explain(field.label), tag("small", field.note) if field.note else None, for_=key)
    if field.long:
        choices = tag("datalist", [tag("option", value=each) for each in field.choices], id=f"{key}-list")
        known = {"value": field.initial, "list": f"{key}-list", "placeholder": "type to search"}
        entry = tag("input", id=key, name=field.name, **known)
        return tag("div", label, entry, choices, class_="field")
    if field.choices:
        options = [] if field.initial else [tag("option", field.unset, value="")]
        options += [tag("option", each, value=each, selected=each == field.initial) for each in field.choices]
        return tag("div", label, tag("select", options, id=key, name=field.name), class_="field")
    named = {"type": "number", "id": key, "name": field.name, "data_plain": field.default or None}
    limits = {"min": field.limits[0], "max": field.limits[1], "value": field.initial, "placeholder": field.unset}
    typed = {"step": "any", "inputmode": "decimal"} if field.decimals else {"inputmode": "numeric"}
    number, slider = tag("input", **named, **limits, **typed), None
    if field.powers:
        power = (int(field.initial) if field.initial else 1).bit_length() - 1
        about = {"data_for": key, "aria_label": f"{field.label}, by powers of two"}
        slider = tag("input", type="range", min=0, max=MOST_POWER, value=power, **about)
    return tag("div", label, tag("div", slider, number, class_="number"), class_="field")
