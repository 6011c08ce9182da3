"""What a checkpoint holds: the weights that are trained and the states of the optimizer, once.

BLOOM's is an example: 2 bytes of bf16 weights, 4 of their fp32 copy and 8 of moments for each of 176 billion
parameters are 2.24 TiB, and its authors tell of 2.3 TB (BigScience 176B model, engineering side).
"""

from stepcast.cost.memory.states import optimizer_bytes
from stepcast.ir.dtype import FP32_BYTES
from stepcast.ir.framework import Framework
from stepcast.ir.layout import Layout
from stepcast.ir.model import Model
from stepcast.ir.sharding import plan_of
from stepcast.ir.stages import StagePiece
from stepcast.ir.strategy import Strategy
from stepcast.ir.trainable import trained_shard


def checkpoint_bytes(model: Model, strategy: Strategy, framework: Framework) -> float:
    """Of the whole model; ranks write their parts of it, and data-parallel copies are written once."""
    single = Strategy(
        Layout(),
        micro_batch=1,
        global_batch=1,
        seq=strategy.seq,
        precision=strategy.precision,
        autocast=strategy.autocast,
        sharding=strategy.sharding,
        training=strategy.training,
        lora_rank=strategy.lora_rank,
        further_tokens=strategy.further_tokens,
    )
    whole = StagePiece(range(model.layers), embedding=True, head=True)
    width = FP32_BYTES if framework.keeps_fp32_weights(single) else single.weights.bytes
    states = optimizer_bytes(model, single, framework, whole, plan_of(single, framework))
    return width * trained_shard(model, single, whole).total + states
