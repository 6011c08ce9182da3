"""The optimizer's time is that of the layers whose role it is, whatever they are called."""

import pytest

from stepcast.forecast.predict import predict
from stepcast.forecast.simulate import simulate
from stepcast.hardware import load_cluster
from stepcast.inputs import simai
from stepcast.inputs.chakra import reader as chakra
from stepcast.inputs.source import Source
from stepcast.ir.layout import Layout
from stepcast.ir.strategy import Strategy
from stepcast.ir.work import Recorded
from stepcast.ir.workload import Block, Layer, Op, Role, Stage, Workload
from stepcast.models.catalog import load_model
from stepcast.outputs.chakra import files

CLUSTER = load_cluster("dgx-h100")
BODY = (Block((Layer("layer", (Op("", Recorded(1.0)),)),)),)


def optimizer_s(workload: Workload) -> float:
    return simulate(workload, CLUSTER).report.breakdown_s["optimizer"]


@pytest.mark.parametrize(("role", "expected_s"), [(Role.OPTIMIZER, 0.5), (None, 0.0)])
@pytest.mark.parametrize("name", ["optimizer", "step"])
def test_a_role_tells_what_a_name_does_not(name: str, role: Role | None, expected_s: float) -> None:
    end = Layer(name, (Op("", Recorded(0.5)),), role=role)
    found_s = optimizer_s(Workload((Stage(BODY, epilogue=(end,)),)))
    assert found_s == pytest.approx(expected_s, abs=1e-9)


def test_the_lines_of_simai_have_their_role() -> None:
    text = "\n".join(
        (
            "HYBRID_TRANSFORMER_FWD_IN_BCKWD model_parallel_NPU_group: 1 ep: 1 pp: 1 vpp: 1 ga: 1 all_gpus: 1",
            "2",
            "embedding_layer -1 4000000 NONE 0 1 NONE 0 1 NONE 0 100",
            "optimizer1 -1 2000000 NONE 0 1 NONE 0 1 NONE 0 100",
        )
    )
    workload = simai.read(Source("workload.txt", text.encode()))
    assert optimizer_s(workload) == pytest.approx(2e-3, rel=1e-3)


def test_a_chakra_trace_keeps_it() -> None:
    strategy = Strategy(Layout(dp=8), 1, 8, 2048)
    workload = predict(load_model("llama-3.2-1b"), CLUSTER, strategy).workload
    written = dict(files(workload, "w.et"))
    again = chakra.read_run([Source(name, data) for name, data in written.items()])
    assert [layer.role for layer in again.stages[0].epilogue] == [layer.role for layer in workload.stages[0].epilogue]
