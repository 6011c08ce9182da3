"""Where a forecast leaves what it was checked against, and says so."""

from stepcast.ir.model import Model
from stepcast.ir.model_parts import Mixer
from stepcast.ir.strategy import Strategy

# The most GPUs of the published runs of many sources; a handful of rows (Llama 3 405B, MegaScale,
# Nemotron-4) go on to 16,384 (data/published).
WELL_CHECKED_GPUS = 6144
# Mixers of whose kernels little was measured, and of which no published run is known.
SELDOM = {
    Mixer.DELTA: "delta nets were measured on an H200 with 4 and 8 heads alone",
    Mixer.SELECTIVE: "the selective scan of Mamba-1 blocks was measured on an H200 alone",
}


def beyond_checked(model: Model, strategy: Strategy) -> list[str]:
    """Warnings of sizes beyond those of the runs that forecasts are compared with."""
    found = []
    if strategy.layout.gpus > WELL_CHECKED_GPUS:
        found.append(
            f"{strategy.layout.gpus:,} GPUs: few published runs have more than {WELL_CHECKED_GPUS:,}, so "
            "this is less sure than a smaller run ('stepcast validate' shows them)"
        )
    if strategy.seq > model.max_seq:
        found.append(f"sequences of {strategy.seq:,} tokens are longer than the {model.max_seq:,} of {model.name}")
    mixers = {block.mixer for block in model.blocks}
    found += [f"{told}; no published run has such layers" for mixer, told in SELDOM.items() if mixer in mixers]
    return found
