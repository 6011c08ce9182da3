"""Prices of GPU-hours: the dated catalogue ``data/prices.toml``, and ``--price auto``."""

from collections.abc import Mapping
from functools import cache

from stepcast.hardware import Cluster
from stepcast.inputs.source import DATA, read_toml
from stepcast.ir.facts import FactDict, Facts
from stepcast.questions.choices import AnyQuestion
from stepcast.units import DEFAULT_CURRENCY


@cache
def load_prices() -> Mapping[str, Facts]:
    """Return the price range of a GPU-hour, its date and its source, by GPU."""
    return read_toml(str(DATA / "prices.toml"))


def list_prices() -> list[FactDict]:
    """Return the catalogue as rows; the price that ``auto`` means is the middle of the range."""
    return [
        {"gpu": gpu, "price": (entry["low"] + entry["high"]) / 2, "currency": DEFAULT_CURRENCY, **entry}
        for gpu, entry in load_prices().items()
    ]


def settle_price(question: AnyQuestion, cluster: Cluster, assumptions: list[str]) -> AnyQuestion:
    """Return *question* with a number for the price ``auto``, which is added to *assumptions* with its source."""
    if getattr(question, "price", None) != "auto":
        return question
    if getattr(question, "currency", DEFAULT_CURRENCY) != DEFAULT_CURRENCY:
        raise ValueError(f"--price auto is in {DEFAULT_CURRENCY}: leave --currency out, or give the price as a number")
    entry = load_prices().get(cluster.gpu.name)
    if entry is None:
        known = ", ".join(load_prices())
        raise ValueError(f"no price of {cluster.gpu.name} is known ({known} are): use --price with a number")
    low, high = entry["low"], entry["high"]
    assumptions.append(
        f"${(low + high) / 2:g} per GPU-hour of {cluster.gpu.name}: the middle of ${low:g} to ${high:g} in "
        f"{entry['date']} ({entry['source']}) (--price)"
    )
    return question.change({"price": (low + high) / 2})
