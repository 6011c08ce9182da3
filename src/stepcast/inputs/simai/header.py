"""The first line of a SimAI workload: policy, parallel layout and checkpoints."""

import re
from dataclasses import dataclass

from stepcast.inputs.errors import FormatError
from stepcast.inputs.rows import parse_amount, parse_count, shorten
from stepcast.ir.layout import Layout
from stepcast.ir.limits import CHUNKS, GPUS, MICRO_BATCHES

POLICIES = (
    "DATA",
    "MODEL",
    "HYBRID_TRANSFORMER",
    "HYBRID_TRANSFORMER_FWD_IN_BCKWD",
    "HYBRID_DLRM",
    "HYBRID_DLRM_ENHANCED",
    "HYBRID_DATA_MODEL",
    "HYBRID_MODEL_DATA",
    "HYBRID_CUSTOMIZED",
    "MICRO",
    "DISTRIBUTED_INFERENCE",
)
COUNT_KEYS = {
    "model_parallel_NPU_group": "tp",
    "ep": "ep",
    "pp": "pp",
    "vpp": "vpp",
    "ga": "micro_batches",
    "all_gpus": "gpus",
}
MOST = {"pp": CHUNKS, "vpp": CHUNKS, "ga": MICRO_BATCHES}
LIST_KEYS = ("checkpoints", "checkpoint_initiates")
# pp_comm is written with and without its colon.
KEY = re.compile(r"([A-Za-z_]\w*):|pp_comm")


@dataclass(frozen=True, slots=True)
class Header:
    """What the first line says; degrees it leaves out are None."""

    policy: str
    tp: int | None = None
    ep: int | None = None
    pp: int | None = None
    vpp: int | None = None
    micro_batches: int | None = None
    gpus: int | None = None
    boundary_bytes: int | None = None
    checkpoints: tuple[int, ...] = ()
    checkpoint_initiates: tuple[int, ...] = ()
    unknown_keys: tuple[str, ...] = ()

    @property
    def layout(self) -> Layout:
        """Degrees with defaults; data parallelism takes the GPUs that are left, by whole division."""
        tp, pp = self.tp or 1, self.pp or 1
        dp = 1 if self.gpus is None else self.gpus // (tp * pp)
        try:
            return Layout(tp=tp, ep=self.ep or 1, pp=pp, vpp=self.vpp or 1, dp=dp)
        except ValueError as error:
            raise FormatError(str(error), line=1) from None


def parse_header(line: str) -> Header:
    """``POLICY key: value ...``; keys in any order, the last one wins."""
    tokens = line.split()
    if not tokens or tokens[0] not in POLICIES:
        found = shorten(tokens[0]) if tokens else "an empty line"
        raise FormatError(f"unknown policy {found}; expected one of {', '.join(POLICIES)}", line=1)
    values: dict[str, object] = {}
    unknown: list[str] = []
    at = 1
    while at < len(tokens):
        match = KEY.fullmatch(tokens[at])
        if match is None:
            raise FormatError(f"{shorten(tokens[at])} where a header key such as 'pp:' was expected", line=1)
        key = match[1] or match[0]
        at += 1
        if key in LIST_KEYS:
            values[key], at = _parse_list(tokens, at, key)
            continue
        if at >= len(tokens):
            raise FormatError(f"header ends after {key!r}; expected its value", line=1)
        if key in COUNT_KEYS:
            values[COUNT_KEYS[key]] = _parse_degree(tokens[at], key)
        elif key == "pp_comm":
            values["boundary_bytes"] = round(parse_amount(tokens[at], key, 1))
        else:
            unknown.append(key)
        at += 1
    header = Header(tokens[0], unknown_keys=tuple(unknown), **values)  # type: ignore[arg-type]
    _check_gpus(header)
    return header


def _parse_degree(token: str, key: str) -> int:
    count, limit = parse_count(token, key, 1, at_least=1), MOST.get(key, GPUS)
    if count > limit.most:
        raise FormatError(f"{key} is {token}; {limit.said}", line=1)
    return count


def _parse_list(tokens: list[str], at: int, key: str) -> tuple[tuple[int, ...], int]:
    """``N i1 .. iN`` at *at*; the indices and where the list ends."""
    if at >= len(tokens):
        raise FormatError(f"header ends after {key!r}; expected a count and that many layer numbers", line=1)
    count = parse_count(tokens[at], key, 1)
    listed = tokens[at + 1 : at + 1 + count]
    if len(listed) < count:
        raise FormatError(f"{key} announces {count} layers but lists {len(listed)}", line=1)
    return tuple(parse_count(token, key, 1) for token in listed), at + 1 + count


def _check_gpus(header: Header) -> None:
    model_gpus = (header.tp or 1) * (header.pp or 1)
    if header.gpus is not None and header.gpus < model_gpus:
        raise FormatError(
            f"all_gpus is {header.gpus}, fewer than tp x pp = {model_gpus}; expected a multiple of it", line=1
        )
