"""Answers as ``data/views.txt`` declares them, and the question at their head, which explains a saved result."""

import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache

from stepcast.ir.types import Fact, FactDict, Facts
from stepcast.views import view as ui
from stepcast.views.view import DATA, NAMES, Figure, Mood, Shown, View, find_value, say

FIGURE = re.compile(r"(> )?(.+?)(?: !(\S+))? (=|\|) (.*)")
HEAD = re.compile("(title|headline|about): (.*)")
PLACES = {"detail": Shown.DETAIL, "text": Shown.TEXT, "page": Shown.PAGE}
LAYOUT = ("tp", "cp", "ep", "pp", "vpp", "dp")
ISSUED = NAMES["execution"]
MOST_SHOWN = 12  # keys without effect
CONFIG_LISTS = NAMES["config_keys"]


@cache
def _read_sections() -> Mapping[str, Sequence[str]]:
    text = (DATA / "views.txt").read_text(encoding="utf-8").replace("\n    ", " ")
    _, *parts = re.split(r"^\[(.+)\]\n", text, flags=re.MULTILINE)
    return {name: lines.strip().split("\n") for name, lines in zip(parts[::2], parts[1::2], strict=True)}


def build_view(section: str, facts: Facts, /, **more: Fact) -> View:
    """Return the view that a section declares of *facts* and *more* values, figures, parts and columns."""
    known, heads = {**facts, **more}, {"title": "", "headline": ""}
    figures: list[Figure] = []
    parts: list[ui.Part | None] = []
    about = [*more.get("about", ())]
    asked: Sequence[tuple[str, object]] = ()
    for row in _read_sections()[section]:
        if match := HEAD.fullmatch(row):
            text = say(match[2], known)
            about += [text] if match[1] == "about" and text is not None else []
            heads[match[1]] = text or ""
        elif row.startswith("+ "):
            parts.append(_part(row[2:], known) if "|" in row else known[row[2:]])
        elif row == "asked":
            asked = asked_pairs(facts)
        else:
            figures += _figures(row, known)
    number, _, unit = heads["headline"].partition(" ")
    headline = ui.Headline(number, unit, about, more.get("band"))
    notes = {name: facts.get(name, ()) for name in ("assumptions", "warnings")}
    return View(heads["title"], headline, figures, parts, facts, asked=asked, **notes)


def build_figures(section: str, facts: Facts, /, **more: Fact) -> list[Figure]:
    """Return the figures that a section declares of *facts* and *more* values."""
    known = {**facts, **more}
    return [figure for row in _read_sections()[section] for figure in _figures(row, known)]


def _figures(row: str, facts: Facts) -> list[Figure]:
    """Return the figure of a row, or those that it names; none where a value is unknown."""
    if row.startswith("@"):
        return [*facts[row[1:]]]
    match = FIGURE.fullmatch(row)
    assert match, f"no figure: {row!r}"
    on_page, name, judged, kind, rest = match.groups()
    texts: dict[str, str | None] = {"name": say(name, facts)}
    for key, template in zip(("value", "note", "line"), re.split(r" *\| *", rest), strict=False):
        texts[key] = say(template, {**facts, **texts} if key != "value" else facts)
    if None in texts.values():
        return []
    title, value, note, line = (str(texts.get(key, "")) for key in ("name", "value", "note", "line"))
    if kind == "=":
        return [ui.text_line(title, value)]
    judgement = Mood.NEUTRAL if judged is None else find_value(facts, judged)
    mood = judgement if isinstance(judgement, Mood) else Mood.GOOD if judgement else Mood.BAD
    return [Figure(title, value, note, line=line, mood=mood, shown=Shown.PAGE if on_page else Shown.ALWAYS)]


def build_pairs(section: str, facts: Facts, /, **more: Fact) -> list[tuple[str, str]]:
    """Return the names and values that a section declares."""
    return [(figure.name, figure.text) for figure in build_figures(section, facts, **more)]


@cache
def read_texts(section: str) -> Mapping[str, str]:
    """Return the texts of a section by their names."""
    return dict(row.split(" = ", 1) for row in _read_sections()[section])


def phrase(name: str, facts: Facts, /, **more: Fact) -> str:
    """Return a sentence of the section *phrases*; nothing where one of its values is unknown."""
    return ui.say(read_texts("phrases")[name], {**facts, **more}) or ""


def phrases(names: str, facts: Facts, /, **more: Fact) -> list[str]:
    """Return those of several sentences whose values are known."""
    return [text for name in names.split() if (text := phrase(name, facts, **more))]


def _part(row: str, facts: Facts) -> ui.Part | None:
    """Return the part of a row: its title, the kind of part and what it shows, then texts that depend on the kind."""
    heading, source, *texts = re.split(r" *\| *", row)
    kind, _, name = source.partition(" ")
    title = str(say(heading, facts))
    if kind == "facts":
        pairs = build_pairs(name, facts) if name in _read_sections() else facts[name]
        return ui.FactList(title, pairs, **_options(texts, facts)) if pairs else None
    path, _, most = (name or source).partition(":")
    rows = (find_value(facts, path) or [])[: int(most) if most else None]
    return BUILDERS.get(kind, _table)(title, rows, facts, *texts)


def _options(texts: Sequence[str], facts: Facts) -> FactDict:
    """Return the options of a part: sentences with their names, and words."""
    options: FactDict = {}
    for text in texts:
        name, is_sentence, sentence = text.partition(": ")
        if is_sentence:
            options[name] = say(sentence, facts) or ""
            continue
        for word in text.split():
            name, _, value = word.partition("=")
            if word.isdigit():
                options["most_lines"] = int(word)
            else:
                known = (int(value),) if value.isdigit() else find_value(facts, value) if value else True
                options |= {"shown": PLACES[word]} if word in PLACES else {name: known}
    return options


def _table(title: str, rows: Sequence[Facts], facts: Facts, spec: str, *texts: str) -> ui.Table:
    """Return a table with the columns of *spec*, stated or computed."""
    is_pair = {head: isinstance(source, tuple) and len(source) == 2 for head, source in facts.items()}
    computed = {head: source for head, source in facts.items() if callable(source[1] if is_pair[head] else source)}
    # A column whose head ends in a question mark is left out where no row has a value of it.
    heads = []
    for head, _, key in (word.partition("?=") for word in spec.split()):
        if not key or any(find_value(row, key.partition(":")[0]) is not None for row in rows):
            heads.append(f"{head}={key}" if key else head)
    return ui.table_of(title, rows, ui.columns(" ".join(heads), **computed), **_options(texts, facts))


def _bars(
    title: str, rows: Sequence[Facts], facts: Facts, label: str, spec: str, value: str, note: str, *texts: str
) -> ui.Bars | None:
    """Return a bar for each row, with a piece of each kind of *spec*."""
    if not rows:
        return None
    pieces = [re.split("[=:]", word) for word in spec.split()]
    kinds = {kind: (words or [kind])[0].replace("_", " ") for kind, _, *words in pieces}
    bars = []
    for row in rows:
        name, shown, more = (say(text, row) or "" for text in (label, value, note))
        bars.append(ui.stack(name, {kind: row[key] for kind, key, *_ in pieces}, kinds, shown, more))
    options = {"most": max(bar.length for bar in bars), **_options(texts, facts)}
    return ui.Bars(title, bars, kinds, **options)


def _remarks(title: str, rows: Sequence[Facts], facts: Facts, template: str, *texts: str) -> ui.Remarks:
    """Return a sentence for each row, its strong words between asterisks, and the evidence that the row has for it."""
    before, *strong_and_rest = template.split("**")
    strong, rest = strong_and_rest or ("", before)
    remarks = [ui.Remark(say(strong, row) or "", say(rest, row) or "", row.get("evidence", ())) for row in rows]
    return ui.Remarks(title, remarks, **_options(texts, facts))


BUILDERS: Mapping[str, Callable[..., ui.Part | None]] = {"remarks": _remarks, "bars": _bars}


def asked_pairs(facts: Facts) -> list[tuple[str, str]]:
    """Return model, cluster, software, layout, batch and command, as far as the facts have them."""
    strategy = facts.get("strategy") or {}
    sequences = strategy if strategy.get("seq") else {**facts, "micro_batch": None}
    words = {"layout": _layout(strategy) if strategy else None, "issued": ISSUED.get(facts.get("execution", ""))}
    words["place"] = _place(facts, strategy) if facts.get("cluster") else None
    command = str(facts.get("command") or "").removeprefix("stepcast ")
    return build_pairs("asked", facts, **words, batch=sequences, asked=command)


def _place(facts: Facts, strategy: Facts) -> str | None:
    """Return the GPUs of a cluster; None where they are not known."""
    if isinstance(searched := facts.get("gpus"), list):
        return f"{', '.join(f'{gpus:,}' for gpus in searched)} GPUs"
    gpus, per_node = strategy.get("gpus") or facts.get("gpus"), facts.get("gpus_per_node")
    if not (facts.get("gpu") and gpus):
        return None
    return f"{gpus:,} {facts['gpu']}" + (f", {per_node} a node" if per_node and gpus > per_node else "")


def _layout(strategy: Facts) -> str:
    """Return the degrees above one, then how states are sharded and activations recomputed."""
    words = ", ".join(f"{name} {strategy[name]:,}" for name in LAYOUT if strategy.get(name, 1) > 1) or "one GPU"
    if "sharding" in strategy:
        words += f"; {'no sharding (DDP)' if strategy['sharding'] == 'none' else strategy['sharding']}"
    if "recompute" in strategy:
        words += f"{',' if 'sharding' in strategy else ';'} recompute {strategy['recompute']}"
    return words


def config_notes(facts: Facts) -> list[str]:
    """Return what became of the keys of a configuration, and the equivalent command."""
    notes = [f"{facts['file']} ({facts['format']}): {len(facts['understood'])} keys used"]
    for name, text in CONFIG_LISTS.items():
        shown, count = list(facts[name]), len(facts[name])
        if name == "ignored" and count > MOST_SHOWN:
            shown = [*shown[:MOST_SHOWN], f"and {count - MOST_SHOWN} more (--json has them)"]
        if shown:
            notes.append(f"{text} ({count}): {', '.join(shown)}")
    return [*notes, *(f"assumed: {note}" for note in facts["assumed"]), f"same as: {facts['command']}"]


def plain_pairs(facts: Facts) -> list[tuple[str, str]]:
    """Return what is neither a table nor a list, by its name in words."""
    plain = {name.replace("_", " "): value for name, value in facts.items() if not isinstance(value, dict | list)}
    return [(name, f"{value:,}" if type(value) is int else str(value)) for name, value in plain.items()]
