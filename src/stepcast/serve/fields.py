"""Fields of the forms, and the choices that a form makes.

Requests reach the program only through these: a value is one of a list, or a whole number within limits. No text
of a request is used as a path or as an option.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache

from stepcast.hardware.catalog import data_names, load_data
from stepcast.ir.types import dataclass
from stepcast.models.catalog import model_names
from stepcast.questions.changes import RECOMPUTES
from stepcast.questions.choices import option_of
from stepcast.questions.question import CHOICES, PRECISIONS
from stepcast.questions.search import OBJECTIVES
from stepcast.units import nearest
from stepcast.version import __version__
from stepcast.views.markup import Markup, explain, fill_template, join, tag

LONGEST_VALUE = 200
OPTION = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*")
DECIMAL, WHOLE = re.compile(r"[0-9]{1,6}(\.[0-9]{1,4})?"), re.compile(r"[0-9]{1,12}")
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
    required: bool = False

    def read(self, value: str) -> str:
        """Return *value* as a question reads it."""
        if self.choices:
            if value not in self.choices:
                hint = nearest(value, self.choices, 3, 0.6) or "; choose one of the list"
                why = f"unrecognised value {value[:40]!r}{hint}" if value else "choose one of the list"
                raise FieldError(f"{self.label}: {why}")
            return value
        low, high = self.limits
        form, kind = (DECIMAL, "number") if self.decimals else (WHOLE, "whole number")
        if not form.fullmatch(value) or not low <= float(value) <= high:
            raise FieldError(f"{self.label}: expected a {kind} from {low:,} to {high:,}")
        return value if self.decimals else f"{int(value)}{self.unit}"


def _read_forms() -> dict[str, tuple[Field, ...]]:
    """Return the fields of each form in ``data/forms.toml``."""
    tables, values = load_data("forms"), {name: choice.values for name, choice in CHOICES.items()}
    values |= {"models": model_names(), "clusters": data_names("clusters"), "frameworks": data_names("frameworks")}
    values |= {"failures": (*data_names("failures"), "none"), "objectives": OBJECTIVES, "currencies": CURRENCIES}
    values |= {"precisions": PRECISIONS, "recomputes": RECOMPUTES}
    fields: dict[str, Field] = {}
    for name, about in tables["fields"].items():
        known = {key: value for key, value in about.items() if key not in ("values", "limits")}
        choices, limits = values[about["values"]] if "values" in about else (), tuple(about.get("limits", (1, 1)))
        fields[name] = field = Field(name, choices=choices, limits=limits, **known)
        fields[f"{name}?"] = replace(field, initial="", powers=False, default="", unset="any")
        fields[f"{name}!"] = replace(field, unset="required", required=True)
    forms = tables["forms"]
    named = {form: names.format(**forms) for form, names in forms.items()}
    named["dropped"] = named["dropped"].replace("!", "")  # a file may choose what the form leaves out
    return {form: tuple(fields[name] for name in names.split()) for form, names in named.items()}


FORMS = _read_forms()
PREDICT = FORMS["predict"]


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
    values = ((field, given.get(name, "").strip()) for name, field in known.items())
    read = [(field, value) for field, value in values if field.required or value not in ("", field.default)]
    read.sort(key=lambda pair: not pair[1])  # what is wrong comes before what is missing
    return tuple((field.name, field.read(value)) for field, value in read)


def name_fields(fields: Sequence[Field], text: str) -> str:
    """Return the text of an error with the labels of a form in place of options, and those that it lacks marked."""
    labels = {option_of(field.name.replace("ran_on", "cluster")): field.label for field in fields}
    named = OPTION.sub(lambda match: labels.get(match[0], match[0]), text)
    others = ", ".join(dict.fromkeys(OPTION.findall(named)))
    return f"{named} (on the command line: {others})" if others else named


def form_command(verb: str, choices: FormChoices) -> str:
    """Return the command that makes the same choices; their values need no quotes."""
    return " ".join(["stepcast", verb, *(f"{option_of(name)} {value}" for name, value in choices)])


MOST_POWER = 14


@cache
def shell(template: str) -> str:
    """Return the page without an answer, from the *template* in the assets."""
    clusters = join(tag("option", name, value=name) for name in data_names("clusters"))
    fields = {verb: [_field(verb, field) for field in fields] for verb, fields in FORMS.items() if verb != "dropped"}
    parts = {verb: tag("form", inputs, id=f"form-{verb}", autocomplete="off") for verb, inputs in fields.items()}
    return f"<!doctype html>\n{fill_template(template, version=__version__, clusters=clusters, **parts)}\n"


def _field(verb: str, field: Field) -> Markup:
    key = f"{verb}-{field.name}"
    label = tag("label", explain(field.label), tag("small", field.note) if field.note else None, for_=key)
    if field.long:
        choices = tag("datalist", [tag("option", value=choice) for choice in field.choices], id=f"{key}-list")
        known = {"value": field.initial, "list": f"{key}-list", "placeholder": "type to search"}
        return tag("div", label, tag("input", id=key, name=field.name, **known), choices, class_="field")
    if field.choices:
        options = [] if field.initial else [tag("option", field.unset, value="")]
        options += [tag("option", choice, value=choice, selected=choice == field.initial) for choice in field.choices]
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
