"""NeMo and Megatron-Bridge: YAML whose keys are Megatron's arguments with underscores, in tables."""

import re
from collections.abc import Mapping

from stepcast.inputs.configs.keys import Keys, RunConfig, closest, flat
from stepcast.inputs.configs.megatron import fill_sizes, read_options, read_sizes
from stepcast.inputs.source import read_words
from stepcast.ir.types import group_by_key

RENAMED = read_words("configs")["nemo"]
# Tables whose keys mean the same as Megatron's arguments.
TABLES = (
    *("", "model", "model.optim", "model.data", "train", "ddp", "optimizer", "comm_overlap", "mixed_precision"),
    *("dist", "dataset"),
)
MODEL_NAMES = ("run.name", "model.recipe", "recipe", "model_name", "tokenizer.tokenizer_model", "tokenizer.type")
# ``${.hidden_size}`` is a key of the same table, ``${multiply:4, ...}`` a product (NeMo's own resolver).
SIBLING = re.compile(r"\$\{\.(\w+)\}")
PRODUCT = re.compile(r"\$\{multiply:\s*(\d{1,12})\s*,\s*(\d{1,12})\s*\}")


def read(table: Mapping[str, object]) -> RunConfig:
    is_bridge = bool({"train", "ddp", "checkpoint", "dataset"} & set(table)) and "trainer" not in table
    keys = _NestedKeys(table)
    sizes = read_sizes(keys)
    if sizes.get("hidden") and not is_bridge:
        sizes = fill_sizes(keys, sizes)
    options = read_options(keys, sizes)
    nodes, devices = keys.number("trainer.num_nodes"), keys.number("trainer.devices")
    if nodes and devices and devices > 0:  # -1: all that a node has
        options["gpus"] = nodes * devices
    precision = keys.word("trainer.precision")
    if "precision" not in options and precision:
        options["precision"] = "bf16" if "bf16" in precision else "fp16" if "16" in precision else "fp32"
        if not any(bits in precision for bits in ("16", "32", "64")):
            keys.report("predicted in fp32", "trainer.precision")
    if "distributed" in keys.word("optim.name", "optimizer.use_distributed_optimizer"):
        options["sharding"] = "zero-1"
    if (bucket_mb := keys.share("optim.bucket_cap_mb")) is not None:
        options["bucket-mb"] = bucket_mb
    if is_bridge:  # a file that overrides a recipe leaves the rest to it
        sharding_keys = ("use-distributed-optimizer", "data-parallel-sharding-strategy")
        switches = ("use-megatron-fsdp", "use-torch-fsdp2", "fsdp")
        if not any(name in keys for name in sharding_keys) and not any(keys.flag(name) for name in switches):
            options.pop("sharding", None)
        overlaps = ("overlap-grad-reduce", "overlap-param-gather", "tp-comm-overlap", "overlap-grad-sync")
        if not any(name in keys for name in overlaps):
            options.pop("overlap", None)
    tool = "megatron-bridge" if is_bridge else "nemo"
    return keys.config(tool, tool, options, sizes if sizes.get("layers") else {}, keys.text(*MODEL_NAMES))


class _NestedKeys(Keys):
    """Dotted keys, found also by Megatron's names."""

    def __init__(self, table: Mapping[str, object]) -> None:
        values = flat(table)
        super().__init__(values, "nemo")
        for name, value in values.items():  # keys of the same table, and products of them
            if isinstance(value, str) and "${" in value and len(value) < 1000:
                parent, text = name.rpartition(".")[0], value
                for sibling in SIBLING.findall(value):
                    text = text.replace(f"${{.{sibling}}}", str(values.get(f"{parent}.{sibling}", f"${{.{sibling}}}")))
                if product := PRODUCT.fullmatch(text.strip()):
                    self.values[name] = int(product[1]) * int(product[2])
                elif "${" not in text:
                    self.values[name] = text
        self._names_of_alias = group_by_key((alias, name) for name in self.values for alias in _aliases(name))

    def __contains__(self, name: str) -> bool:
        return name in self._names_of_alias

    def spell(self, *names: str) -> tuple[str, ...]:
        return tuple(own for name in names for own in (*self._names_of_alias.get(name, ()), name))

    def listed_as(self, name: str) -> str:
        return next(filter(None, map(self.known.find, (name, *_aliases(name)))), "")

    def nearest(self, name: str) -> str:
        """Compare the last part alone where Megatron's arguments are meant, with the same table before it."""
        table, dot, last = name.rpartition(".")
        if table not in TABLES:
            return closest(name, self.all_names())
        match = closest(last, {known.replace("-", "_") for known in self.all_names() if "." not in known})
        return f"{table}{dot}{match}" if match else ""


def _aliases(name: str) -> list[str]:
    """Return what *name* is called as well: Megatron's argument, and the key inside ``model``."""
    table, _, last = name.rpartition(".")
    tail = name.removeprefix("model.")
    argument = [last.replace("_", "-")] if table in TABLES else []
    return [*argument, *([RENAMED[tail]] if tail in RENAMED else []), tail]
