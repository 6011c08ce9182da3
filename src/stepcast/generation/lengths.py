"""Lengths of prompts and responses in tokens: a number, a distribution or measured lengths from a file.

A distribution is sampled at the middle of n equally likely ranges, so equal questions have equal answers. The order
is then shuffled with a fixed seed: requests reach engines independently of their length.
"""

import math
from pathlib import Path
from statistics import NormalDist

import numpy as np

from stepcast.inputs.source import Source
from stepcast.ir.arrays import FloatArray
from stepcast.ir.limits import LENGTHS
from stepcast.ir.types import dataclass, require

SEED = 20
SHAPES = ("lognormal", "exponential", "uniform", "normal")
KEYS = ("mean", "cv", "max", "min")
DEFAULT_CV = 0.6  # of responses whose mean alone is known; stated as an assumption wherever it is used
MOST_TOKENS = 10**8


@dataclass(frozen=True, slots=True)
class Lengths:
    """The distribution of lengths: *mean* is that of the lengths after they are cut to *least* and *most*.

    *cv* is the standard deviation over the mean before the cut. *samples* are measured lengths.
    """

    mean: float
    shape: str = "fixed"
    cv: float = 0.0
    least: float = 1.0
    most: float = math.inf
    samples: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if not (1 <= self.mean <= MOST_TOKENS and 0 <= self.cv <= 10 and 1 <= self.least <= self.mean <= self.most):
            raise ValueError(f"lengths need 1 <= min <= mean <= max and a cv from 0 to 10, not {self}")

    def draw(self, count: int) -> FloatArray:
        """Return *count* lengths in whole tokens, shuffled."""
        chances = (np.arange(count) + 0.5) / count
        if self.samples:
            lengths = np.quantile(np.array(self.samples), chances)
        elif self.shape == "fixed" or self.cv == 0.0:
            lengths = np.full(count, self.mean)
        else:
            quantiles = self._quantiles(chances)
            # Scaled so that their mean after the cut is the one wanted.
            low, high = 1e-3 * self.mean, 1e3 * self.mean
            for _ in range(60):
                scale = math.sqrt(low * high)
                mean = float(np.clip(quantiles * scale, self.least, self.most).mean())
                low, high = (scale, high) if mean < self.mean else (low, scale)
            lengths = np.clip(quantiles * math.sqrt(low * high), self.least, self.most)
        order = np.random.default_rng(SEED).permutation(count)
        shuffled: FloatArray = np.maximum(np.rint(lengths), 1.0)[order]
        return shuffled

    def _quantiles(self, chances: FloatArray) -> FloatArray:
        """Return quantiles of the shape with a mean of about 1."""
        if self.shape == "exponential":
            return np.asarray(-np.log1p(-chances))
        if self.shape == "uniform":
            return np.asarray(1.0 + (chances - 0.5) * 2.0 * math.sqrt(3.0) * self.cv)
        deviates = np.array([NormalDist().inv_cdf(chance) for chance in chances])
        if self.shape == "normal":
            return np.asarray(1.0 + self.cv * deviates)
        sigma = math.sqrt(math.log1p(self.cv**2))
        return np.asarray(np.exp(sigma * deviates - sigma**2 / 2.0))

    def __str__(self) -> str:
        if self.samples:
            return f"{len(self.samples):,} measured lengths, mean {self.mean:,.0f} tokens"
        if self.shape == "fixed":
            return f"{self.mean:,.0f} tokens"
        limit = f", at most {self.most:,.0f}" if self.most < math.inf else ""
        return f"{self.shape} with a mean of {self.mean:,.0f} tokens and cv {self.cv:.3g}{limit}"


def parse_lengths(text: str) -> Lengths:
    """Return the lengths that a text states: ``2048``, ``2k``, ``uniform:500-1500``,
    ``lognormal:mean=3000,cv=0.8,max=8192``, or a file with one length a line.
    """
    if number := _number(text):
        return Lengths(number)
    shape, colon, rest = text.partition(":")
    if not colon or shape not in SHAPES:
        path = Path(text)
        if path.is_file():
            return _read_lengths(path)
        raise ValueError(f"{text!r} is no length; use 2048, uniform:500-1500, lognormal:mean=3000,cv=0.8,max=8192 "
                         f"({', '.join(SHAPES)}), or a file with one length a line")  # fmt: skip
    if shape == "uniform" and "=" not in rest:
        first, _, last = rest.partition("-")
        low, high = _number(first), _number(last)
        if not (low and high and low <= high):
            raise ValueError(f"{text!r} is no range; use uniform:500-1500")
        mean = (low + high) / 2.0
        return Lengths(mean, "uniform", (high - low) / mean / math.sqrt(12.0), low, high)
    values: dict[str, float] = {}
    for word in filter(None, rest.split(",")):
        key, _, value = word.partition("=")
        require(key.strip() in KEYS, f"{key.strip()!r} in {text!r} is not known; use {', '.join(KEYS)}")
        try:
            values[key.strip()] = float(value) if key.strip() == "cv" else (_number(value) or float("nan"))
        except ValueError:
            raise ValueError(f"{value!r} in {text!r} is no number") from None
    require("mean" in values, f"{text!r} lacks a mean")
    cv = values.get("cv", DEFAULT_CV if shape != "exponential" else 1.0)
    return Lengths(values["mean"], shape, cv, values.get("min", 1.0), values.get("max", math.inf))


def _number(text: str) -> float | None:
    """Return a count of tokens such as 2048 or 2k; None where it is none."""
    plain = text.strip().lower().replace("_", "")
    scale = 1024.0 if plain.endswith("k") else 1.0
    try:
        number = float(plain.removesuffix("k")) * scale
    except ValueError:
        return None
    return number if 0 < number < math.inf else None


def _read_lengths(path: Path) -> Lengths:
    samples: list[float] = []
    for index, line in enumerate(Source(path).text(LENGTHS).splitlines(), 1):
        number = _number(line)
        if line.strip() and (number is None or number > MOST_TOKENS):
            raise ValueError(f"{path}, line {index}: {line[:40]!r} is no length in tokens")
        samples += [number] if number else []
    require(bool(samples), f"{path} has no lengths")
    return Lengths(sum(samples) / len(samples), "measured", 0.0, min(samples), max(samples), tuple(samples))
