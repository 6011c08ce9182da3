"""The megatron-memory set: bytes allocated at the peak, against those that ``memory`` predicts."""

import csv
import shlex
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from stepcast.cost.memory import memory
from stepcast.frameworks.command import UnsaidError, predict_words
from stepcast.hardware import load_cluster
from stepcast.ir.model import Model
from stepcast.ir.watched import watched
from stepcast.models.catalog import load_model
from stepcast.models.columns import SIZES, words_of
from stepcast.validate.megatron_memory.row import Case, Record
from stepcast.validate.scoreboard import Measurements, Row, columns

FILE = "megatron_memory.csv"
CLUSTERS = {"a100-sxm-80gb": "dgx-a100", "h100-sxm": "dgx-h100", "gb200": "gb200-nvl72"}
# Models of the catalogue whose architecture the tests use with sizes of their own.
LIKE = ("megatron-22b",)
LARGE_HIDDEN = 2048
COMMAND = "command"
NOTES = (
    "bytes that PyTorch had allocated at the peak on the last rank of the world, against the last stage",
    "most models are tiny: hidden 512, so that constants of 0.1 GB matter",
)


def measure_folder(*folders: str) -> Measurements:
    """The tests in ``megatron_memory.csv`` of *folders*, or in these files."""
    rows: list[Row] = []
    skipped: Counter[str] = Counter()
    for record in watched(record for folder in folders for record in _records(Path(folder))):
        try:
            rows.append(_row(Case(record)))
        except (ValueError, KeyError) as error:
            skipped[str(error)] += 1
    table = columns(rows)
    large = {"hidden 2048 and more": table.tags["size"] == "large"} if rows else {}
    return Measurements(table, skipped, large, notes=NOTES, details=(COMMAND, "size"), unit="bytes")


def _row(test: Case) -> Row:
    cluster = load_cluster(CLUSTERS[test.text("gpu")])
    *_, last = memory(test.model, test.strategy, cluster.gpu, test.framework)
    tags = {
        "kind": test.text("kind"),
        "gpu": test.text("gpu"),
        "software": test.text("software"),
        "hidden": test.text("hidden"),
        "attention": "flash" if test.framework.flash_attention else "unfused",
        "optimizer": str(test.strategy.sharding),
        "engine": test.text("transformer_impl"),
        "size": "large" if test.model.hidden >= LARGE_HIDDEN else "small",
        COMMAND: _command(test),
    }
    return Row(test.name, test.measured_bytes, last.allocated, tags)


def _command(test: Case) -> str:
    """What a user types to see the memory of each stage, or why it cannot be typed."""
    gpu = test.text("gpu")
    try:
        model = _said_model(test.model)
        said = predict_words(test.profile, test.model, gpu, test.strategy, test.framework)
    except UnsaidError as error:
        return f"cannot be said: {error}"
    words = ["stepcast", "predict", "--model", model, "--cluster", CLUSTERS[gpu], *said, "--explain-memory"]
    return shlex.join(words)


def _said_model(model: Model) -> str:
    """A name with sizes, as ``load_model`` takes it, that means *model*."""
    sizes = {name: getattr(model, name) for name in SIZES} | {"seq": model.max_seq}
    for name in LIKE:
        word = words_of(name, sizes)
        if replace(load_model(word), name=model.name, source=model.source) == model:
            return word
    raise UnsaidError("no model of the catalogue is like it; a config.json would have to say it")


def _records(path: Path) -> Iterator[Record]:
    file = path if path.is_file() else path / FILE
    if not file.is_file():
        raise ValueError(f"{path}: expected {FILE}, or a csv file with its columns")
    with file.open(encoding="utf-8", newline="") as lines:
        reader = csv.DictReader(lines)
        if not {"max_mem_bytes", "test", "kind"} <= set(reader.fieldnames or ()):
            raise ValueError(f"{file}: expected the columns of {FILE}, such as test, kind, max_mem_bytes")
        yield from reader
