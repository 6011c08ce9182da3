"""Legal strategies on clusters, drawn for properties that every forecast has."""

from dataclasses import dataclass, replace
from typing import Any

from hypothesis import assume
from hypothesis import strategies as st

from stepcast.hardware import Cluster
from stepcast.hardware.catalog import load_cluster
from stepcast.ir.framework import Execution, Framework, Offloaded
from stepcast.ir.layout import Layout
from stepcast.ir.legality import is_legal
from stepcast.ir.model import Model
from stepcast.ir.strategy import (
    Offload,
    Overlap,
    Recompute,
    RecomputeKind,
    ScheduleKind,
    Sharding,
    Strategy,
    TrainingKind,
)
from stepcast.ir.types import DType
from stepcast.models.catalog import load_model

# A few layers of small and large ones: what differs between them is the size of the layers.
LAYERS = 8
MODELS = tuple(
    load_model(name).with_layers(LAYERS)
    for name in ("llama-3.2-1b", "llama-3.1-8b", "llama-3.1-405b", "mixtral-8x7b", "qwen3-30b-a3b")
)
CLUSTERS = tuple(load_cluster(name) for name in ("dgx-a100", "dgx-h100", "gb200-nvl72"))
CHUNKS = {ScheduleKind.INTERLEAVED: 2, ScheduleKind.ZB_V: 2}
pick = st.sampled_from


@dataclass(frozen=True)
class Case:
    """What a forecast takes."""

    model: Model
    cluster: Cluster
    strategy: Strategy
    framework: Framework

    def with_layout(self, **degrees: int) -> "Case":
        """The same with other degrees of parallelism and as many micro-batches."""
        layout = replace(self.strategy.layout, **degrees)
        batch = self.strategy.micro_batches * layout.dp * self.strategy.micro_batch
        return replace(self, strategy=replace(self.strategy, layout=layout, global_batch=batch))

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """In one line where a property fails: what hypothesis would print of a cluster is long."""
        printer.text(f"{self.model.name} on {self.cluster.name}: {self.strategy}")

    @property
    def legal(self) -> bool:
        return is_legal(self.model, self.strategy, self.framework)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    model, cluster = draw(pick(MODELS)), draw(pick(CLUSTERS))
    pp = draw(pick((1, 1, 2, 4)))
    schedule = draw(pick(tuple(ScheduleKind))) if pp > 1 else ScheduleKind.ONE_F_ONE_B
    tp, cp, dp = draw(pick((1, 2, 4))), draw(pick((1, 2))), draw(pick((1, 4, 16)))
    sharding = draw(pick(tuple(Sharding)))
    ranks = dp * cp
    experts = model.experts is not None
    layout = Layout(
        tp=tp,
        cp=cp,
        dp=dp,
        pp=pp,
        vpp=CHUNKS.get(schedule, 1),
        ep=draw(pick([ep for ep in (1, 2, 8) if tp * ranks % ep == 0])) if experts else 1,
        expert_tp=1 if experts else 0,
        shard=min(2, ranks) if sharding is Sharding.HYBRID_FSDP else 0,
    )
    training = draw(pick((TrainingKind.FULL, TrainingKind.FULL, TrainingKind.LORA)))
    micro_batch = draw(pick((1, 2)))
    batches = draw(pick((1, 2, 4, 8))) * (2 * pp if pp > 1 else 1)
    strategy = Strategy(
        layout,
        micro_batch,
        micro_batch * batches * dp,
        draw(pick((1024, 8192))),
        sequence_parallel=tp > 1,
        schedule=schedule,
        sharding=sharding,
        recompute=draw(pick((Recompute(), Recompute(RecomputeKind.SELECTIVE), Recompute(RecomputeKind.FULL)))),
        overlap=Overlap(*(draw(st.booleans()) for _ in Overlap.__dataclass_fields__)),
        precision=draw(pick([each for each in (DType.BF16, DType.FP8) if each in cluster.gpu.matrix_flops])),
        expert_imbalance=draw(pick((1.0, 1.5))) if layout.ep > 1 else 1.0,
        expert_capacity=draw(pick((None, 0.2, 1.2))) if experts else None,
        offload=draw(pick((Offload(), Offload(), Offload(1, 0), Offload(0, 1), Offload(0.5, 0.4)))),
        training=training,
        lora_rank=16 if training is TrainingKind.LORA else 0,
    )
    framework = Framework(
        gradient_dtype=draw(pick((DType.FP32, DType.BF16))),
        execution=draw(pick((Execution.GRAPHS, Execution.EAGER))),
        offloaded=draw(pick(tuple(Offloaded))),
    )
    case = Case(model, cluster, strategy, framework)
    assume(case.legal)
    return case
