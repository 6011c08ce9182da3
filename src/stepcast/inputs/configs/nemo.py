"""NeMo and Megatron-Bridge: YAML whose keys are Megatron's with underscores, in tables."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from stepcast.inputs.configs.keys import Keys, RunConfig, closest, flat, said
from stepcast.inputs.configs.megatron import options_of, sizes_of

# Tables whose keys mean the same as Megatron's arguments.
TABLES = (
    "model",
    "model.optim",
    "model.data",
    "train",
    "ddp",
    "optimizer",
    "comm_overlap",
    "mixed_precision",
    "dist",
    "dataset",
)
RENAMED = {
    "optim.name": "optimizer",
    "optim.overlap_grad_sync": "overlap-grad-sync",
    "optim.overlap_param_sync": "overlap-param-sync",
    "tp_comm_overlap": "tp-comm-overlap",
}


def looks_like_bridge(table: Mapping[str, Any]) -> bool:
    names = set(table)
    return bool({"train", "ddp", "checkpoint", "dataset"} & names) and "trainer" not in names and "model" in names


def read(table: Mapping[str, Any]) -> RunConfig:
    bridge = looks_like_bridge(table)
    keys = _Nested(table)
    sizes = sizes_of(keys)
    options = options_of(keys, sizes)
    nodes, devices = keys.number("trainer.num_nodes"), keys.number("trainer.devices")
    if nodes and devices:
        options["gpus"] = nodes * devices
    precision = keys.text("trainer.precision").lower()
    if "precision" not in options and precision:
        options |= said(precision="bf16" if "bf16" in precision else "fp16" if "16" in precision else "fp32")
    if "distributed" in keys.text("optim.name", "optimizer.use_distributed_optimizer").lower():
        options["sharding"] = "zero-1"
    if (bucket_mb := keys.share("optim.bucket_cap_mb")) is not None:
        options["bucket-mb"] = bucket_mb
    if keys.number("trainer.gradient_clip_val") == 0:
        options["clipping"] = False
    if bridge and not _names_sharding(keys):
        options.pop("sharding", None)  # an override leaves the rest to its recipe
    if bridge:
        options = _of_override(keys, options)
    names = ("run.name", "model.recipe", "recipe", "model_name", "tokenizer.tokenizer_model", "tokenizer.type")
    model = keys.text(*names)
    return keys.config(
        "megatron-bridge" if bridge else "nemo",
        "megatron-bridge" if bridge else "nemo",
        sizes=sizes if sizes.get("layers") else {},
        model=model,
        options=options,
    )


def _names_sharding(keys: "_Nested") -> bool:
    """Return whether a file says how states are sharded."""
    named = any(name in keys for name in ("use-distributed-optimizer", "data-parallel-sharding-strategy"))
    return named or any(keys.flag(name) for name in ("use-megatron-fsdp", "use-torch-fsdp2", "fsdp"))


def _of_override(keys: "_Nested", options: dict[str, Any]) -> dict[str, Any]:
    """A file that overrides a recipe says what it changes; other overlaps stay the recipe's."""
    named = ("overlap-grad-reduce", "overlap-param-gather", "tp-comm-overlap", "overlap-grad-sync")
    if not any(name in keys for name in named):
        options.pop("overlap", None)
    return options


# ``${.hidden_size}`` is a key of the same table, ``${multiply:4, ...}`` a product (NeMo's own resolver).
BESIDE = re.compile(r"\$\{\.(\w+)\}")
PRODUCT = re.compile(r"\$\{multiply:\s*(\d{1,12})\s*,\s*(\d{1,12})\s*\}")


def _resolved(values: Mapping[str, Any]) -> dict[str, Any]:
    """*values* with what they take from beside them."""

    def beside(name: str, text: str) -> str:
        place = name.rpartition(".")[0]
        return BESIDE.sub(lambda found: str(values.get(f"{place}.{found[1]}", found[0])), text)

    told = dict(values)
    for name, value in values.items():
        if isinstance(value, str) and "${" in value and len(value) < 1000:
            product = PRODUCT.fullmatch(beside(name, value).strip())
            told[name] = int(product[1]) * int(product[2]) if product else value
    return told


class _Nested(Keys):
    """Dotted keys, found also by Megatron's names."""

    def __init__(self, table: Mapping[str, Any]) -> None:
        super().__init__(_resolved(flat(table)), "nemo")
        self.same: dict[str, list[str]] = {}
        for name in self.values:
            for alias in self._aliases(name):
                self.same.setdefault(alias, []).append(name)

    def _aliases(self, name: str) -> list[str]:
        """Return what *name* is called as well: Megatron's argument, and the key inside ``model``."""
        place, _, last = name.rpartition(".")
        tail = name.removeprefix("model.")
        argument = last.replace("_", "-")
        found = [argument] if place in TABLES or place == "" else []
        return [*found, *([RENAMED[tail]] if tail in RENAMED else []), tail]

    def __contains__(self, name: str) -> bool:
        return name in self.same

    def raw(self, *names: str) -> Any:
        self.asked.update(names)
        return super().raw(*(own for name in names for own in (*self.same.get(name, ()), name)))

    def own_names(self, *names: str) -> Iterator[str]:
        for name in names:
            yield from self.same.get(name, ())

    def listed_as(self, name: str) -> str:
        return next(filter(None, map(self.known.find, (name, *self._aliases(name)))), "")

    def nearest(self, name: str) -> str:
        """Compare the last part alone where Megatron's arguments are meant, with the same table before it."""
        place, dot, last = name.rpartition(".")
        known = {*self.known.no_effect, *self.known.not_modelled, *self.asked}
        if place not in TABLES and place:
            return closest(name, known)
        plain = {each.replace("-", "_") for each in known if "." not in each}
        found = closest(last, plain)
        return f"{place}{dot}{found}" if found else ""
