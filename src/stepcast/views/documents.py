"""Views of documents that ``show`` reads, of catalogues that ``list`` prints, and of captured programs."""

from collections.abc import Callable, Iterable, Mapping, Sequence

from stepcast.ir.types import FactDict, Facts
from stepcast.units import GB, TFLOPS, US, format_bytes, format_count, format_rate, format_seconds
from stepcast.views import compare, generation, measured, plan, search, step
from stepcast.views import view as ui
from stepcast.views.declared import build_view, read_texts
from stepcast.views.view import NAMES

Parts = list[ui.Part | None]
# What verbs print with --json; --html shows it too.
ANSWER_VIEWS: Mapping[str, Callable[..., ui.View]] = {
    **dict.fromkeys(("answer of predict", "answer of simulate"), step.step_view),
    "answer of plan": plan.plan_view,
    "answer of search": search.search_view,
    "answer of generate": generation.generation_view,
    "answer of network": step.network_view,
    "alternatives": search.alternatives_view,
    "comparison": compare.compare_view,
    "verdict": compare.gate_view,
    "replay": measured.replay_view,
    "megatron run": measured.megatron_view,
    "kineto run": measured.kineto_view,
    "kineto replay": measured.kineto_replay_view,
}
JOB_VIEWS: Mapping[str, Callable[..., ui.View]] = {
    "step log": measured.step_log_view,
    "collectives": measured.collective_log_view,
    "worker steps": measured.stragglers_view,
    **ANSWER_VIEWS,
}


def documents_view(documents: Sequence[Facts]) -> ui.View:
    """Return the view of all documents together; the titles of several name their files."""
    views = [document_view(document) for document in documents]
    if len(views) == 1:
        return views[0]
    parts: Parts = []
    for document, view in zip(documents, views, strict=True):
        figures = ui.FactList("Key figures", [(figure.name, figure.text) for figure in view.figures])
        named = (part for part in (figures, *view.parts) if part and part.title != "Contents")  # the figures again
        parts += [ui.replace(part, title=f"{document['file']}: {part.title}") for part in named]
    warnings = [warning for view in views for warning in view.warnings]
    headline = ui.Headline(f"{len(views):,}", "documents", [document["file"] for document in documents])
    return ui.View(f"{len(views)} documents", headline, (), parts, {"documents": list(documents)}, warnings=warnings)


def document_view(document: Facts) -> ui.View:
    """Return the view of a document: its contents as names and values, then tables."""
    if view_job := JOB_VIEWS.get(document["kind"]):
        return view_job(document)
    headline = ui.Headline(document["title"], "", (document["file"], document["format"]))
    title = f"{document['file']}: {document['title']}"
    return ui.replace(_contents_view(document), title=title, headline=headline, warnings=document["warnings"])


def _contents_view(facts: Facts) -> ui.View:
    """Return the view that the section of its kind declares; its figures are a list on the page."""
    view = build_view(f"show {facts['kind']}", facts, **VALUES.get(facts["kind"], dict)(facts))
    listed = [(figure.name, figure.text) for figure in view.figures]
    contents = ui.FactList("Contents", listed, wide=True, shown=ui.Shown.PAGE)
    return ui.replace(view, parts=[contents if listed else None, *view.parts])


def _lines(pairs: Iterable[tuple[str, object]]) -> list[ui.Figure]:
    return [ui.text_line(name, str(value)) for name, value in pairs]


def _layout(facts: Facts) -> str:
    """Return the degrees whose product is the number of GPUs, then those that share the same GPUs."""
    if "tp" not in facts:
        return "not known"
    names = [name for name in ("tp", "cp", "dp", "pp") if name != "cp" or facts[name] > 1]
    product = " x ".join(f"{name} {facts[name]}" for name in names)
    parts = [f"{product} = {format_count(facts['gpus'])} GPUs" if facts["gpus"] > 1 else "one GPU"]
    if facts["ep"] > 1:
        parts.append(f"ep {facts['ep']}")
    if facts["vpp"] > 1:
        parts.append(f"vpp {facts['vpp']} (chunks per stage)")
    return ", ".join(parts)


def _workload(facts: Facts) -> FactDict:
    repeats = [f"{block['repeat']} x {len(block['layers'])} lines" for block in facts["body"] if block["repeat"] > 1]
    phases = [f"{phase} {format_seconds(s)}" for phase, s in facts["compute_by_phase_s"].items() if s]
    counts = ", ".join(f"{count} {kind}" for kind, count in facts["ops"].items())
    return {
        "layout": _layout(facts),
        "repeats": ", ".join(repeats),
        "phases": ", ".join(phases) if len(phases) > 1 else None,
        "between": ui.say("{boundary_bytes} per micro-batch", facts),
        "counts": counts if set(facts["ops"]) - {"recorded"} else None,
        "summed_stages": min(facts["stages_given"], facts["pp"]) if facts["stages_given"] > 1 < facts["pp"] else None,
        "largest_first": sorted(facts["collectives"], key=lambda row: -row["total_bytes"]),
    }


def _timeline(facts: Facts) -> FactDict:
    ranks = facts["ranks"]
    listed = f"rank {ranks[0]}" if len(ranks) == 1 else f"{len(ranks)} ranks ({_list_numbers(ranks)})"
    listed += ", one of each stage" if len(ranks) == facts.get("pp", 1) > 1 and not facts["measured"] else ""
    pairs: list[tuple[str, object]] = [
        (f"parameters, stage {stage}", f"{format_count(count)} per rank")
        for stage, count in (facts.get("parameters") or {}).items()
    ]
    is_predicted = not facts["measured"] and "step_s" in facts
    if is_predicted:
        pairs += [("predicted step", format_seconds(facts["step_s"])), ("predicted by", facts["command"])]
    for name in ("devices", "world_size", "backend", "steps", "runs"):
        if value := facts.get(name):
            words = ", ".join(map(str, value)) if isinstance(value, list | tuple) else value
            pairs.append((name.replace("_", " "), words))
    sizes = ("hidden", "layers", "heads", "seq", "micro_batch", "micro_batches", "vocab", "dtype")
    known = (f"{name.replace('_', '-')} {facts[name]}" for name in sizes if facts.get(name) is not None)
    return {
        "layout": _layout(facts),
        "listed": listed,
        "span_s": None if is_predicted else facts["span_s"],  # the CPU may issue work before the step begins
        "model": ", ".join(known),
        "more": _lines(pairs),
        "size_/_shortest": lambda row: format_rate(row["size_bytes"] / row["shortest_s"]) if row["shortest_s"] else "-",
    }


def _list_numbers(numbers: Sequence[int]) -> str:
    if numbers[-1] - numbers[0] == len(numbers) - 1:
        return f"{numbers[0]}..{numbers[-1]}"
    return ", ".join(map(str, numbers[:8])) + (", ..." if numbers[8:] else "")


def _model(facts: Facts) -> FactDict:
    hidden = ("kind", "format", "file", "title", "warnings")
    shown = {name: value for name, value in facts.items() if name not in hidden and not isinstance(value, dict)}
    counted = {name: format_count(value) if type(value) is int else value for name, value in shown.items()}
    return {"listed": _lines((name.replace("_", " "), value) for name, value in counted.items())}


def _cluster(facts: Facts) -> FactDict:
    nic, host, domain = facts["nic"], facts["host"], facts["scale_up_gpus"]
    return {
        "size": ui.say("{nodes} nodes, {gpus} GPUs[, and {other.nodes} nodes of {other.name}]", facts),
        "peaks": ", ".join(f"{name} {flops / TFLOPS:g}" for name, flops in facts["gpu"]["matrix_flops"].items()),
        "fabric_rate": _link_rate(facts["fabric"]),
        "nic_rate": _link_rate(nic) if nic else None,
        "no_nic": not nic,
        "networks": ", ".join([facts["network"], *facts["routes"]]),
        "link_rate": _link_rate(host["link"]) if host else None,
        "scale_up": domain if domain > facts["gpus_per_node"] else None,
    }


def _link_rate(link: Facts) -> str:
    reached = f" x {link['efficiency']:.2f}" if link["efficiency"] < 1 else ""
    return f"{link['bandwidth_bytes_per_s'] / GB:g} GB/s{reached} each way, {link['latency_s'] / US:.2g} us"


def _framework(facts: Facts) -> FactDict:
    software, supported = facts["software"], facts["supports"].items()
    enabled = [name for name, value in software.items() if value is True and name != "flash_attention"]
    return {
        "fused": "flash" if software["flash_attention"] else "unfused",
        "master": "fp32 weights" if facts["optimizer"]["master_weights"] else "no fp32 weights",
        "enabled": ", ".join(enabled).replace("_", " "),
        "overlap": ", ".join(facts["defaults"]["overlap"]),
        "supported": _lines((key.replace("_", " "), ", ".join(words) or "none") for key, words in supported),
    }


def captured_view(facts: Facts) -> ui.View:
    """Return the view of a program that was just captured."""
    return ui.replace(_contents_view(facts), warnings=())


def captured_search_view(facts: Facts) -> ui.View:
    """Return the view of the ways to distribute a captured program."""
    rows = [{"rank": rank, **row} for rank, row in enumerate(facts["rows"], 1)]
    view = build_view("captured search", facts, best=rows[0], ranked=rows)
    if rows[0]["fits"]:
        return view
    about = f"fastest step of {facts['model']} on {facts['gpus']:,} GPUs"
    return ui.replace(view, headline=ui.Headline("does not fit", about, ()))


def _captured(facts: Facts) -> FactDict:
    names = ("parameters", "gradients", "optimizer", "activations", "temporary")
    parts = [(f"  {name}", format_bytes(facts["memory_bytes"][name])) for name in names]
    repeated = [block for block in facts["body"] if block["repeat"] > 1 and block["layers"]]
    has_samples = facts["tokens"] == facts["batch"]  # such as images
    return {
        "has_samples": has_samples,
        "has_sequences": not has_samples,
        "more": _lines([*parts, *((name, value) for name, value in facts["facts"].items() if value)]),
        "repeated": [
            {**block, "ends": ", ".join(dict.fromkeys((block["layers"][0], block["layers"][-1])))} for block in repeated
        ],
    }


# By kind of document: the values of its section that its facts do not have.
VALUES: dict[str, Callable[[Facts], FactDict]] = {
    "workload": _workload,
    "timeline": _timeline,
    "operator times": lambda facts: {"unknown": sum(facts["left_out"].values()) or None},
    "run log": lambda facts: {
        "layout": _layout(facts),
        "median_s": facts["median_batch_s"] or None,
        "ends_with": lambda row: row["ends_with"] or "-",
    },
    "model": _model,
    "cluster": _cluster,
    "wiring": lambda facts: {
        "counts": _lines((words, f"{facts[key]:,} nodes") for key, words in NAMES["wiring"].items() if key in facts),
        "no_nics": facts.get("nics") == 0,
    },
    "framework": _framework,
    "calibration": lambda facts: {
        "corrected": [{"class": name, **row} for name, row in facts["classes"].items()],
        "fitted": [{"name": name, "value": value} for name, value in facts["constants"].items()],
    },
    "captured": _captured,
}


def _peak(*names: str) -> tuple[str, Callable[[Facts], str]]:
    """Return the source of a dense matrix peak in TFLOP/s, in the first of these formats that a GPU has."""

    def peak(gpu: Facts) -> str:
        return next((f"{gpu['matrix_flops'][name] / TFLOPS:g}" for name in names if name in gpu["matrix_flops"]), "-")

    return "matrix_flops", peak


def _short_evidence(text: str) -> str:
    """Return where the constants of costs were measured: on the GPU, on its architecture, or elsewhere."""
    return {"measured": "own", "scaled": "scaled"}[text.partition(" ")[0]] if " on " not in text else "family"


COMPUTED: Mapping[str, ui.Source] = {
    **{name: _peak(name) for name in ("fp32", "bf16", "fp8")},
    "fp4": _peak("fp4", "nvfp4"),
    "products": lambda row: _short_evidence(row["costs"]["training products"]),
    "serving": lambda row: _short_evidence(row["costs"]["serving operators"]),
    "parameters": (
        "parameters",
        lambda row: f"{size / 1e9:.2f} B" if (size := row["parameters"]) >= 1e9 else f"{size / 1e6:.0f} M",
    ),
    "experts": ("experts", lambda row: row["experts"] or "-"),
}
ON_WIDE_TERMINALS = ("products", "serving")


def list_view(what: str, rows: Sequence[Facts]) -> ui.View:
    """Return the view of a catalogue: a row for each entry."""
    columns = ui.columns(read_texts("catalogues")[what], **COMPUTED)
    short = {head: source for head, source in columns.items() if head not in ON_WIDE_TERMINALS}
    name = {"gpus": "GPUs", "failures": "failure profiles"}.get(what, what)
    title = name[:1].upper() + name[1:]
    narrow = ui.table_of(title, rows, short, uncut=(0,)) if len(short) < len(columns) else None
    table = ui.table_of(title, rows, columns, uncut=(0,), sortable=True, wide=True, narrow=narrow)
    headline = ui.Headline(f"{len(rows):,}", name, ("Catalogue",))
    return ui.View(f"{len(rows):,} {name}", headline, (), [table], {what: rows})
