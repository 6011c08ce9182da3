"""``check`` inside a script, with objects that have what Trainer, Accelerator and Megatron-LM's arguments have."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from stepcast import check
from stepcast.checking import ForecastCallback, RunCheck, RunDoesNotFitError

LLAMA = {
    "model_type": "llama", "hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 32, "head_dim": 64,
    "num_key_value_heads": 8, "intermediate_size": 8192, "vocab_size": 128256, "max_position_embeddings": 131072,
    "tie_word_embeddings": True, "_name_or_path": "meta-llama/Llama-3.2-1B",
}  # fmt: skip


class Model:
    """A module with a Hugging Face config, and adapters if *rank* is given."""

    def __init__(self, rank: int = 0, four_bits: bool = False) -> None:
        self.config = SimpleNamespace(to_dict=lambda: LLAMA)
        self.dtype = "torch.float32" if rank else "torch.bfloat16"
        if rank:
            lora = SimpleNamespace(r=rank, lora_dropout=0.05, target_modules={"q_proj", "v_proj"})
            self.peft_config = {"default": lora}
        self.is_loaded_in_4bit = four_bits

    def parameters(self) -> list[Any]:
        return [SimpleNamespace(dtype=self.dtype, requires_grad=True)]


class Arguments:
    """The arguments of a Trainer."""

    world_size, max_steps, num_train_epochs = 1, -1, 2.0
    per_device_train_batch_size, gradient_accumulation_steps = 2, 4

    def to_dict(self) -> dict[str, Any]:
        names = ("per_device_train_batch_size", "gradient_accumulation_steps", "num_train_epochs")
        return {"bf16": True, "output_dir": "out", **{name: getattr(self, name) for name in names}}


class Trainer:
    """A Trainer: arguments, a model, samples, and callbacks."""

    def __init__(self, model: Model, lengths: list[int]) -> None:
        self.args, self.model = Arguments(), model
        self.train_dataset = [{"input_ids": [0] * length} for length in lengths]
        self.added: list[Any] = []

    def add_callback(self, callback: Any) -> None:
        self.added.append(callback)


def run_check(trainer: Any = None, **choices: Any) -> tuple[RunCheck, list[str]]:
    lines: list[str] = []
    return check(trainer, write=lines.append, **{"gpu": "h100-sxm", **choices}), lines


def test_a_trainer_is_forecast_in_three_lines() -> None:
    run, lines = run_check(Trainer(Model(), [1024] * 100), price=3)
    assert len(lines) == 3
    assert "tokens/s on 1 x h100-sxm" in lines[0]
    assert "fits" in lines[1]
    assert "25 steps" in lines[2]
    assert "$" in lines[2]
    strategy = run.run.strategy
    assert (strategy.micro_batch, strategy.global_batch, strategy.seq, strategy.lora_rank) == (2, 8, 1024, 0)
    assert run.run.framework.name == "trainer"


def test_adapters_and_four_bits_are_seen() -> None:
    run, _ = run_check(Trainer(Model(16, four_bits=True), [512] * 8))
    strategy = run.run.strategy
    assert (strategy.lora_rank, strategy.lora_targets, str(strategy.base_weights)) == (16, ("query", "value"), "nf4")
    assert run.run.framework.name == "peft"


def test_samples_of_several_lengths_are_padded() -> None:
    run, _ = run_check(Trainer(Model(), [128, 2048] * 40))
    assert run.run.strategy.longest == 2048
    assert 128 < run.run.strategy.seq < 2048


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU, whether or not another test has loaded PyTorch, which would find none."""
    monkeypatch.setattr("stepcast.checking.run.has_gpu", lambda: True)
    monkeypatch.setattr("stepcast.checking.run.measure_peaks", lambda: None)


@pytest.mark.usefixtures("gpu")
def test_the_callback_compares_steps_with_the_forecast() -> None:
    trainer = Trainer(Model(), [1024] * 100)
    run, lines = run_check(trainer, compare_after=3)
    (callback,) = trainer.added
    for _ in range(6):
        callback.on_step_begin(None, None, None)
        callback.on_step_end(None, None, None)
        callback.on_log(None, None, None)
    assert "predicted" in lines[3]
    assert run.facts["measured_s"] < run.facts["predicted_s"]


def test_steps_without_a_gpu_are_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=SimpleNamespace(is_available=lambda: False)))
    monkeypatch.setattr("stepcast.checking.run.gather_slowest", lambda loading_s: None)
    run, lines = run_check(Trainer(Model(), [1024] * 100), compare_after=3)
    for _ in range(6):
        run.step()
    assert "a step without a GPU; the forecast is for h100-sxm" in lines[3]


@pytest.mark.usefixtures("gpu")
def test_peaks_of_a_gpu_with_nothing_on_it_are_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stepcast.checking.run.measure_peaks", lambda: (0, 0))
    trainer = Trainer(Model(), [1024] * 100)
    run, lines = run_check(trainer, compare_after=3)
    before = len(lines)
    (callback,) = trainer.added
    for _ in range(6):
        callback.on_step_begin(None, None, None)
        callback.on_step_end(None, None, None)
    assert "predicted" in lines[before]
    assert "measured_allocated_bytes" not in run.facts


def test_a_callback_alone_forecasts_when_training_begins() -> None:
    lines: list[str] = []
    trainer = Trainer(Model(), [256] * 16)
    callback = ForecastCallback(gpu="h100-sxm", write=lines.append)
    loader = SimpleNamespace(dataset=trainer.train_dataset)
    callback.on_train_begin(trainer.args, None, None, model=trainer.model, train_dataloader=loader)
    assert len(lines) == 3
    assert callback.facts["verdict"] == "fits"


def test_what_does_not_fit_stops_a_strict_check() -> None:
    with pytest.raises(RunDoesNotFitError, match="does not fit"):
        run_check(None, model="llama-3.1-70b", framework="transformers", strict=True, seq=4096, gpus=1)


def test_an_accelerator_and_arguments_of_megatron_are_read() -> None:
    state = SimpleNamespace(distributed_type="DistributedType.MULTI_GPU", num_processes=4, mixed_precision="bf16")
    accelerator = SimpleNamespace(state=state, gradient_accumulation_steps=8)
    run, _ = run_check(accelerator, model="llama-3.2-1b", micro_batch=2, seq=512)
    assert (run.run.strategy.micro_batches, run.run.strategy.layout.dp) == (8, 4)
    state.distributed_type = "DistributedType.FSDP"
    words = {"BackwardPrefetch.BACKWARD_POST": True, "BackwardPrefetch.BACKWARD_PRE": False, None: True}
    for word, is_late in words.items():
        state.fsdp_plugin = SimpleNamespace(fsdp_version=1, backward_prefetch=word)
        run, _ = run_check(accelerator, model="llama-3.2-1b", micro_batch=2, seq=512)
        assert run.run.framework.late_gathers is is_late
    arguments = SimpleNamespace(
        tensor_model_parallel_size=2, micro_batch_size=1, global_batch_size=8, seq_length=2048, world_size=8, bf16=True
    )
    run, _ = run_check(arguments, model="llama-3.1-8b")
    assert (run.run.strategy.layout.tp, run.run.strategy.layout.dp, run.run.strategy.seq) == (2, 4, 2048)


def test_other_objects_are_refused() -> None:
    with pytest.raises(TypeError, match="knows no int"):
        check(3, gpu="h100-sxm")


def test_without_a_gpu_one_must_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stepcast.checking.run.has_gpu", lambda: False)
    with pytest.raises(ValueError, match="no GPU at hand"):
        check(model="llama-3.2-1b", write=lambda line: None)


def test_a_gpu_at_hand_has_its_host_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host that takes 1.5 times as long for a small step makes a step longer that it limits."""
    usual: list[Any] = []
    slow: list[Any] = []
    for lines, seconds in ((usual, 7.7e-3), (slow, 11.6e-3)):
        monkeypatch.setattr("stepcast.checking.run.detect_gpu", lambda: "NVIDIA H200")
        monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=SimpleNamespace(is_available=lambda: False)))
        monkeypatch.setattr("stepcast.pytorch.profile.small_step", lambda *known: None)
        monkeypatch.setattr("stepcast.pytorch.profile.host_s", lambda *known, host_s=seconds: host_s)
        run = check(model="llama-3.2-1b", framework="peft", lora_rank=16, seq=512, gbs=1, write=lines.append)
        lines.append(run.facts["predicted_s"])
    assert usual[-1] * 1.3 < slow[-1] < usual[-1] * 1.5
    assert "CPU time x 1.39, measured here" in slow[0]


def test_a_cpu_that_slows_down_during_the_run_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The small step takes 7.7 ms at the forecast and 1.5 times as long after the steps that are compared."""
    seconds = iter([7.7e-3, 2e-3, *([3e-3] * 5)])
    monkeypatch.setattr("stepcast.checking.run.detect_gpu", lambda: "NVIDIA H200")
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=SimpleNamespace(is_available=lambda: False)))
    monkeypatch.setattr("stepcast.checking.run.has_gpu", lambda: True)
    monkeypatch.setattr("stepcast.checking.run.measure_peaks", lambda: None)
    monkeypatch.setattr("stepcast.checking.run.gather_slowest", lambda loading_s: None)
    monkeypatch.setattr("stepcast.pytorch.profile.small_step", lambda *known: None)
    monkeypatch.setattr("stepcast.pytorch.profile.host_s", lambda *known: next(seconds))
    lines: list[str] = []
    run = check(model="llama-3.2-1b", framework="peft", lora_rank=16, seq=512, gbs=1, steps=9999, write=lines.append)
    for _ in range(22):
        run.step()
    assert not list(seconds)
    assert run.facts["host_pace_during"] == pytest.approx(1.5 * run.facts["host_pace"])
    assert run.facts["predicted_at_pace_s"] > 1.3 * run.facts["predicted_s"]
    assert "the CPU was 1.50 times slower during these steps than at the forecast" in lines[4]


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(
    ("pauses_s", "times_s"), [([0.0, 0.5, 0.5, 0.5, 0.0, 0.0], [0.8, 1.8]), ([0.5] * 6, [0.8, 0.8])]
)
def test_steps_are_measured_without_pauses_and_loading_apart(
    pauses_s: list[float], times_s: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps of 0.8 s whose data take 0.2 s to load. The first two and those before a pause, in which nothing overlaps,
    do not count, unless all have a pause; the pause itself never does.
    """
    now = [0.0]
    run, lines = run_check(None, model="llama-3.1-8b", gpus=8, global_batch=8)
    monkeypatch.setattr("stepcast.checking.run.time", SimpleNamespace(perf_counter=lambda: now[0]))
    for pause_s in [9.0, 9.0, *pauses_s]:
        run.begin_step()
        now[0] += times_s[pause_s > 0]
        monkeypatch.setattr(run, "_watch_host", lambda pause_s=pause_s: now.__setitem__(0, now[0] + pause_s))
        run.end_step()
        now[0] += 0.2
    run.compare()
    assert run.facts["measured_s"] == pytest.approx(1.0)
    assert run.facts["loading_s"] == pytest.approx(0.2)
    assert run.facts["ratio"] == pytest.approx(run.facts["predicted_s"] - 1)
    assert any("data loading takes 200.00 ms of each step" in line for line in lines)
