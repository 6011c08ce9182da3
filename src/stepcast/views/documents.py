"""Views of documents that ``show`` reads, of catalogues that ``list`` prints, and of captured programs."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from stepcast.ir.facts import Facts
from stepcast.units import (
    GB,
    GIB,
    HOUR,
    TFLOPS,
    US,
    format_bytes,
    format_count,
    format_percent,
    format_rate,
    format_seconds,
    format_short_count,
)
from stepcast.views import view as ui
from stepcast.views.jobs import collective_log_view, step_log_view, stragglers_view
from stepcast.views.view import NAMES

Pairs = list[tuple[str, object]]
Parts = list[ui.Part | None]
Contents = tuple[Pairs, *tuple[ui.Part, ...]]
"""Names and values, then tables."""
MOST_ROWS = 16
JOB_VIEWS = {"step log": step_log_view, "collectives": collective_log_view, "worker steps": stragglers_view}


def documents_view(documents: Sequence[Facts]) -> ui.View:
    """Return the view of all documents together; the titles of several name their files."""
    views = [document_view(document) for document in documents]
    if len(views) == 1:
        return views[0]
    parts: Parts = []
    for document, view in zip(documents, views, strict=True):
        figures = ui.FactList("Key figures", [(figure.name, figure.text) for figure in view.figures])
        parts += [replace(part, title=f"{document['file']}: {part.title}") for part in (figures, *view.parts) if part]
    warnings = [warning for view in views for warning in view.shown_warnings]
    headline = ui.Headline(f"{len(views):,}", "documents", [document["file"] for document in documents])
    return ui.View(f"{len(views)} documents", headline, (), parts, {"documents": list(documents)}, warnings=warnings)


def document_view(document: Facts) -> ui.View:
    """Return the view of a document: its contents as names and values, then tables."""
    if view_job := JOB_VIEWS.get(document["kind"]):
        return view_job(document)
    headline = ui.Headline(document["title"], "", (document["file"], document["format"]))
    title = f"{document['file']}: {document['title']}"
    return _contents_view(title, headline, document, document["warnings"])


def _contents_view(title: str, headline: ui.Headline, facts: Facts, warnings: Sequence[str]) -> ui.View:
    pairs, *parts = CONTENTS[facts["kind"]](facts)
    figures = [ui.text_line(name, str(value)) for name, value in pairs]
    contents = ui.FactList("Contents", [(name, str(value)) for name, value in pairs], wide=True, shown=ui.Shown.PAGE)
    return ui.View(title, headline, figures, [contents if pairs else None, *parts], facts, warnings=warnings)


def _table(title: str, rows: Sequence[Facts], columns: Mapping[str, ui.Source]) -> ui.Table:
    return ui.table_of(title, rows, columns, most_lines=MOST_ROWS, sortable=True, wide=True)


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


def _workload(facts: Facts) -> Contents:
    repeats = [f"{block['repeat']} x {len(block['layers'])} lines" for block in facts["body"] if block["repeat"] > 1]
    phases = [f"{phase} {format_seconds(s)}" for phase, s in facts["compute_by_phase_s"].items() if s]
    boundary = facts["boundary_bytes"]
    pairs: Pairs = [
        ("layout", _layout(facts)),
        ("lines", format_count(facts["lines"])),
        ("micro-batches", f"{facts['micro_batches']} of {facts['layers_per_micro_batch']} lines"),
        ("repeated layers", ", ".join(repeats) or "none"),
        ("once per step", f"{len(facts['prologue'])} lines before, {len(facts['epilogue'])} after"),
        ("compute", format_seconds(facts["compute_s"]) + (f" ({', '.join(phases)})" if len(phases) > 1 else "")),
        ("between stages", "not stated" if boundary is None else f"{format_bytes(boundary)} per micro-batch"),
    ]
    if "communication_elements" in facts:
        pairs.append(("communicated", f"{format_count(facts['communication_elements'])} elements"))
    if set(facts["ops"]) - {"recorded"}:
        pairs.append(("ops", ", ".join(f"{count} {kind}" for kind, count in facts["ops"].items())))
    columns = ui.columns("communication=kind group phase count=count, largest=largest_bytes total_per_rank=total_bytes")
    largest_first = sorted(facts["collectives"], key=lambda row: -row["total_bytes"])
    return pairs, _table("Communication", largest_first, columns)


MODEL_FACTS = ("hidden", "layers", "heads", "seq", "micro_batch", "micro_batches", "vocab", "dtype")


def _timeline(facts: Facts) -> Contents:
    ranks = facts["ranks"]
    listed = f"rank {ranks[0]}" if len(ranks) == 1 else f"{len(ranks)} ranks ({ranks[0]}..{ranks[-1]})"
    pairs: Pairs = [
        ("layout", _layout(facts)),
        ("seen", f"{listed}, {format_count(facts['spans'])} spans on {facts['lanes']} lanes"),
        ("span", format_seconds(facts["span_s"])),
    ]
    model = ", ".join(f"{name.replace('_', '-')} {facts[name]}" for name in MODEL_FACTS if facts.get(name) is not None)
    if model:
        pairs.append(("model", model))
    for stage, count in (facts.get("parameters") or {}).items():
        pairs.append((f"parameters, stage {stage}", f"{format_count(count)} per rank"))
    for name in ("devices", "world_size", "backend", "steps"):
        if value := facts.get(name):
            words = ", ".join(map(str, value)) if isinstance(value, list | tuple) else value
            pairs.append((name.replace("_", " "), words))
    operations = ui.columns("operation=name kind count=count, total=total_s longest=longest_s")
    messages: dict[str, ui.Source] = {
        **ui.columns("communication=kind group size=size_bytes count=count, total=total_s shortest=shortest_s"),
        "size / shortest": lambda row: format_rate(row["size_bytes"] / row["shortest_s"]) if row["shortest_s"] else "-",
    }
    table = _table("Operations", facts["operations"], operations)
    return pairs, table, _table("Communication", facts["communication"], messages)


def _collective_sweep(facts: Facts) -> Contents:
    pairs: Pairs = [
        ("collective", facts["collective"] or "not stated"),
        ("ranks", f"{facts['ranks']} on {facts['nodes']} node{'s' if facts['nodes'] != 1 else ''}"),
        ("device", facts["device"] or "not stated"),
        ("element", facts["dtype"] or "not stated"),
    ]
    columns = ui.columns(
        "size=size_bytes out_of_place=out_of_place_s in_place=in_place_s size_/_time=algbw_bytes_per_s"
    )
    return pairs, ui.table_of("Sizes", facts["rows"], columns, sortable=True)


def _operator_times(facts: Facts) -> Contents:
    pairs: Pairs = [("measured", f"{format_count(facts['points'])} operators")]
    if facts["left_out"]:
        pairs.append(("not known", f"{sum(facts['left_out'].values())} rows"))
    pairs.append(("use", "stepcast calibrate FILE --gpu G -o C.toml"))
    columns = ui.columns("operator dtype points=points, shortest=shortest_s longest=longest_s")
    return pairs, ui.table_of("Operators", facts["operators"], columns, sortable=True)


def _run_log(facts: Facts) -> Contents:
    pairs: Pairs = [
        ("layout", _layout(facts)),
        ("parameters", format_count(facts["parameters"])),
        ("batch", f"{facts['global_batch']} = {facts['micro_batches']} micro-batches of {facts['micro_batch']}"),
        ("found", f"{facts['blocks']} rank reports, {facts['layer_records']} layer records"),
        ("batches", f"{facts['batches']} lines"),
        ("median batch", format_seconds(facts["median_batch_s"]) if facts["median_batch_s"] else "not known"),
    ]
    spec = "stage ends_with layers forward_per_micro-batch=median_forward_s"
    columns = ui.columns(spec, ends_with=lambda row: row["ends_with"] or "-")
    return pairs, ui.table_of("Stages", facts["stages"], columns)


def _model(facts: Facts) -> Contents:
    hidden = ("kind", "format", "file", "title", "warnings")
    shown = {name: value for name, value in facts.items() if name not in hidden and not isinstance(value, dict)}
    counted = {name: format_count(value) if type(value) is int else value for name, value in shown.items()}
    return ([(name.replace("_", " "), value) for name, value in counted.items()],)


def _cluster(facts: Facts) -> Contents:
    gpu, fabric, nic = facts["gpu"], facts["fabric"], facts["nic"]
    peaks = ", ".join(f"{name} {flops / TFLOPS:g}" for name, flops in gpu["matrix_flops"].items())
    size = "as large as asked for" if facts["gpus"] is None else f"{facts['nodes']} nodes, {facts['gpus']} GPUs"
    in_switch = ", adds in the switch" if facts["in_switch_reduction"] else ""
    transport = f", {facts['transport']}" if facts["transport"] else ""
    pairs: Pairs = [
        ("cluster", f"{facts['name']}: {facts['description']}" if facts["description"] else facts["name"]),
        ("size", size),
        ("node", f"{facts['gpus_per_node']} x {gpu['name']}"),
        ("matrix peak", f"{peaks} TFLOP/s dense"),
        ("memory", f"{gpu['memory_bytes'] / GIB:.0f} GiB at {gpu['memory_bandwidth_bytes_per_s'] / GB:,.0f} GB/s"),
        ("fabric", f"{fabric['kind']}, {_link_rate(fabric)}{in_switch}"),
        ("NICs", f"{facts['nics_per_node']} of {_link_rate(nic)}{transport}" if nic else "none"),
        ("network", ", ".join([facts["network"], *facts["routes"]])),
    ]
    if host := facts["host"]:
        rate = host["memory_bandwidth_bytes_per_s"] / GB
        memory = f"{host['memory_bytes'] / GB:,.0f} GB at {rate:,.0f} GB/s"
        pairs.append(("host", f"{memory}, {host['links']} links of {_link_rate(host['link'])}"))
    if facts["scale_up_gpus"] > facts["gpus_per_node"]:
        pairs.append(("scale-up domain", f"{facts['scale_up_gpus']} GPUs"))
    return (pairs,)


def _link_rate(link: Facts) -> str:
    reached = f" x {link['efficiency']:.2f}" if link["efficiency"] < 1 else ""
    return f"{link['bandwidth_bytes_per_s'] / GB:g} GB/s{reached} each way, {link['latency_s'] / US:.2g} us"


NODE_COUNTS = NAMES["wiring"]


def _wiring(facts: Facts) -> Contents:
    pairs: Pairs = []
    if "gpus" in facts:
        pairs.append(("node", f"{facts['gpus']} x {facts.get('gpu', 'GPU')}"))
    if "fabric" in facts:
        links = f", {facts['fabric_links']:g} NVLinks" if "fabric_links" in facts else ""
        rate = f", {facts['fabric_bytes_per_s'] / GB:g} GB/s each way" if "fabric_bytes_per_s" in facts else ""
        pairs.append(("fabric", f"{facts['fabric']}{links}{rate}"))
    if "sockets" in facts:
        pairs.append(("sockets", facts["sockets"]))
    if "nics" in facts:
        rate = f" of {facts['nic_bytes_per_s'] / GB:g} GB/s" if "nic_bytes_per_s" in facts else ""
        pairs.append(("NICs", f"{facts['nics']}{rate}" if facts["nics"] else "none"))
    pairs += [(words, f"{facts[key]:,} nodes") for key, words in NODE_COUNTS.items() if key in facts]
    return (pairs,)


def _framework(facts: Facts) -> Contents:
    software, optimizer, memory, defaults = (facts[part] for part in ("software", "optimizer", "memory", "defaults"))
    enabled = [
        name.replace("_", " ") for name, value in software.items() if value is True and name != "flash_attention"
    ]
    attention = "flash" if software["flash_attention"] else "unfused"
    master = "fp32 weights" if optimizer["master_weights"] else "no fp32 weights"
    held = f"{memory['context_bytes'] / GB:g} GB of context, {memory['communicator_bytes'] / GIB:g} GiB a group"
    activations, moments = (format_percent(memory[name], 0) for name in ("fragmentation", "displaced"))
    fragments = f"{activations} of activations and {moments} of moments fragmented"
    notes = " (expandable segments)" if memory["expandable_segments"] else ""
    notes += ", fitted" if memory["fitted"] else ""
    pairs: Pairs = [
        ("framework", f"{facts['name']}: {facts['description']}"),
        ("kernels", f"{software['kernels']}, issued {software['execution']}"),
        ("attention", f"{attention}, kernels {software['attention']}"),
        ("gradients", software["gradient_dtype"]),
        ("optimizer", f"{optimizer['kind']}, moments {optimizer['moment_dtype']}, {master}"),
        ("dispatcher", software["dispatcher"]),
        ("offloaded", software["offloaded"]),
        ("selective", software["selective"]),
        ("enabled", ", ".join(enabled) or "none"),
        ("memory", f"{held}, {fragments}{notes}"),
        ("defaults", "{precision}, sharding {sharding}, recompute {recompute}".format(**defaults)),
        ("overlap", ", ".join(defaults["overlap"]) or "nothing"),
    ]
    pairs += [(key.replace("_", " "), ", ".join(words) or "none") for key, words in facts["supports"].items()]
    if facts["presets"]:
        pairs.append(("presets", facts["presets"]))
    return (pairs,)


def _calibration(facts: Facts) -> Contents:
    classes = [{"class": name, **row} for name, row in facts["classes"].items()]
    columns = ui.columns("class measured_/_predicted=factor:.3f least_time=least_s 90_%_within=spread:%")
    above = f"cost estimates of {facts['gpu']} corrected by measurements"
    rows = [(name, f"{value:.6g}") for name, value in facts["constants"].items()]
    constants = ui.plain_table("Constants", ("constant", "value"), rows, above=f"constants of runs on {facts['gpu']}")
    return [], ui.table_of("Classes", classes, columns, above=above), constants


MEMORY_PARTS = ("parameters", "gradients", "optimizer", "activations", "temporary")


def captured_view(facts: Facts) -> ui.View:
    """Return the view of a program that was just captured."""
    headline = ui.Headline(format_short_count(facts["parameters"]), "parameters", (facts["name"],))
    return _contents_view(facts["name"], headline, facts, ())


def captured_search_view(facts: Facts) -> ui.View:
    """Return the view of the ways to distribute a captured program."""
    best = facts["rows"][0]
    about = f"fastest step of {facts['model']} on {facts['gpus']:,} GPUs"
    headline = ui.Headline.of_seconds(best["step_s"], about, ())
    if not best["fits"]:
        headline = ui.Headline("does not fit", about, ())
    rows = [{"rank": rank, **row} for rank, row in enumerate(facts["rows"], 1)]
    columns = ui.columns("rank tp pp dp sharding step=step_s memory=memory_bytes fits=fits:yes")
    table = ui.table_of(f"{facts['candidates']} layouts, {facts['fitting']} fit", rows, columns)
    return ui.View(f"search {facts['model']}", headline, (), (table,), facts)


def _captured(facts: Facts) -> Contents:
    memory = facts["memory_bytes"]
    pairs: Pairs = [
        ("program", facts["name"]),
        ("parameters", format_count(facts["parameters"])),
        ("a step", f"{format_short_count(facts['flops'])} FLOPs in {facts['ops']:,} kernels"),
        ("of a batch", f"{facts['batch']:,} ({facts['tokens']:,} tokens) in {facts['precision']}"),
        ("peak memory", format_bytes(facts["peak_memory_bytes"])),
        *((f"  {name}", format_bytes(memory[name])) for name in MEMORY_PARTS),
        *((name, value) for name, value in facts["facts"].items() if value),
    ]
    repeated = [block for block in facts["body"] if block["repeat"] > 1 and block["layers"]]
    ends = [", ".join(dict.fromkeys((block["layers"][0], block["layers"][-1]))) for block in repeated]
    rows = [(block["repeat"], len(block["layers"]), end) for block, end in zip(repeated, ends, strict=True)]
    return pairs, ui.plain_table("Repeated layers", ("repeats", "modules", "from, to"), rows[:MOST_ROWS])


CONTENTS: dict[str, Callable[[Facts], Contents]] = {
    "workload": _workload,
    "timeline": _timeline,
    "sweep": _collective_sweep,
    "operator times": _operator_times,
    "run log": _run_log,
    "model": _model,
    "cluster": _cluster,
    "wiring": _wiring,
    "framework": _framework,
    "calibration": _calibration,
    "captured": _captured,
}

# ---- catalogues ---------------------------------------------------------------------------------------


def _peak(*names: str) -> tuple[str, Callable[[Facts], str]]:
    """Return the source of a dense matrix peak in TFLOP/s, in the first of these formats that a GPU has."""

    def peak(gpu: Facts) -> str:
        return next((f"{gpu['matrix_flops'][name] / TFLOPS:g}" for name in names if name in gpu["matrix_flops"]), "-")

    return "matrix_flops", peak


def _hours(name: str) -> ui.Source:
    return name, lambda row: f"{row[name] / HOUR:,.0f}" if row[name] else "-"


def _parameter_words(model: Facts) -> str:
    count = model["parameters"]
    return f"{count / 1e9:.2f} B" if count >= 1e9 else f"{count / 1e6:.0f} M"


def _short_evidence(text: str) -> str:
    """Return where the constants of costs were measured: on the GPU, on its architecture, or elsewhere."""
    return {"measured": "own", "scaled": "scaled"}[text.partition(" ")[0]] if " on " not in text else "family"


CATALOGUES: Mapping[str, Mapping[str, ui.Source]] = {
    "formats": ui.columns("format holds read=read:yes written=written:yes what_it_is=title"),
    "gpus": {
        "gpu": "name",
        "architecture": "architecture",
        "fp32": _peak("fp32"),
        "bf16": _peak("bf16"),
        "fp8": _peak("fp8"),
        "fp4": _peak("fp4", "nvfp4"),
        "GiB": ("memory_bytes", lambda row: f"{row['memory_bytes'] / GIB:.0f}"),
        "TB/s": ("memory_bandwidth_bytes_per_s", lambda row: f"{row['memory_bandwidth_bytes_per_s'] / 1e12:.2f}"),
        "SMs": "sms",
        "W": "power_w:.0f",
        "products": lambda row: _short_evidence(row["costs"]["training products"]),
        "serving": lambda row: _short_evidence(row["costs"]["serving operators"]),
    },
    "clusters": {
        "cluster": "name",
        "node": lambda row: f"{row['gpus_per_node']} x {row['gpu']['name']}",
        "fabric": "fabric.kind",
        "GB/s": lambda row: f"{row['fabric']['bandwidth_bytes_per_s'] / GB:g}",
        "NICs": "nics_per_node",
        "Gb/s": lambda row: f"{row['nic']['bandwidth_bytes_per_s'] * 8 / GB:g}" if row["nic"] else "-",
        **ui.columns("transport network"),
    },
    "models": ui.columns(
        "model parameters layers hidden heads kv=kv_heads experts",
        parameters=("parameters", _parameter_words),
        experts=("experts", lambda row: row["experts"] or "-"),
    ),
    "frameworks": ui.columns(
        "framework=name kernels=software.kernels execution=software.execution gradients=software.gradient_dtype "
        "sharding=defaults.sharding recompute=defaults.recompute"
    ),
    "prices": ui.columns(
        "gpu price_per_GPU-hour range as_of=date source",
        range=("low", lambda row: f"${row['low']:.2f} to ${row['high']:.2f}"),
        **{"price_per_GPU-hour": ("price", lambda row: f"${row['price']:.2f}")},
    ),
    "failures": ui.columns(
        "failures hours_per_GPU per_node per_link what_it_is=description",
        hours_per_GPU=_hours("gpu_s"),
        per_node=_hours("node_s"),
        per_link=_hours("link_s"),
    ),
}


ON_WIDE_TERMINALS = ("products", "serving")


def list_view(what: str, rows: Sequence[Facts]) -> ui.View:
    """Return the view of a catalogue: a row for each entry."""
    columns = CATALOGUES[what]
    short = {head: source for head, source in columns.items() if head not in ON_WIDE_TERMINALS}
    name = {"gpus": "GPUs", "failures": "failure profiles"}.get(what, what)
    title = name[:1].upper() + name[1:]
    narrow = ui.table_of(title, rows, short, uncut=(0,)) if len(short) < len(columns) else None
    table = ui.table_of(title, rows, columns, uncut=(0,), sortable=True, wide=True, narrow=narrow)
    headline = ui.Headline(f"{len(rows):,}", name, ("Catalogue",))
    return ui.View(f"{len(rows):,} {name}", headline, (), [table], {what: rows})
