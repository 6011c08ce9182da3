"""What recomputed modules free, what further tokens keep, and that neither changes anything else."""

from dataclasses import replace
from itertools import combinations

import pytest

from stepcast.cost.memory import memory
from stepcast.cost.memory.piece import loss_bytes
from stepcast.generate.recompute import recompute_modules
from stepcast.generate.workload import generate
from stepcast.hardware.catalog import load_gpu
from stepcast.ir.framework import MEGATRON_CORE, Framework, Kernels
from stepcast.ir.layers.kinds import count_saved
from stepcast.ir.layout import Layout
from stepcast.ir.model import Model
from stepcast.ir.strategy import Recompute, RecomputeKind, RecomputeModule, Strategy
from stepcast.models.catalog import load_model

M = RecomputeModule
DENSE, EXPERTS, LATENT = (load_model(name) for name in ("llama-3.1-8b", "mixtral-8x7b", "deepseek-v3"))
HYBRID = load_model("nemotron3-super")
B200 = load_gpu("b200")
SEQ = 4096
ALONE = Strategy(Layout(), 1, 4, SEQ)


def selective(strategy: Strategy, *modules: RecomputeModule) -> Strategy:
    return replace(strategy, recompute=Recompute(RecomputeKind.SELECTIVE, modules=modules))


def freed(model: Model, framework: Framework, *modules: RecomputeModule, layer: int = -1) -> float:
    """Bytes for each token that the layer keeps less."""
    block = model.blocks[layer]
    without = count_saved(model, ALONE, block, framework).saved
    kept = count_saved(model, selective(ALONE, *modules), block, framework).saved
    return (without - kept) / ALONE.local_tokens


@pytest.mark.parametrize(
    ("model", "layer", "module", "expected"),
    [
        (DENSE, -1, M.CORE, 0),  # flash attention stores no scores
        (DENSE, -1, M.LATENT_UP, 0),
        (DENSE, -1, M.NORMS, 0),  # part of the projections
        (DENSE, -1, M.MLP, 3 * 14336 * 2),  # gate, up and product
        (DENSE, -1, M.EXPERT_ACTIVATION, 0),
        (DENSE, -1, M.EXPERTS, 0),
        (EXPERTS, -1, M.LATENT_UP, 0),
        (EXPERTS, -1, M.NORMS, 4096 * 2),  # before the router alone
        (EXPERTS, -1, M.MLP, 0),
        (EXPERTS, -1, M.EXPERT_ACTIVATION, 2 * 14336 * 2),  # products of two experts
        # Tokens sorted for two experts, gate, up and product of each, the router's logits and probabilities.
        (EXPERTS, -1, M.EXPERTS, 2 * 4096 * 2 + 2 * 3 * 14336 * 2 + 2 * 8 * 4),
        (LATENT, -1, M.LATENT_UP, 128 * (192 + 192 + 128) * 2),  # queries, keys and values
        (LATENT, -1, M.NORMS, 2 * 7168 * 2),  # before the latents, and before the router
        (LATENT, 0, M.NORMS, 7168 * 2),
        (LATENT, -1, M.MLP, 0),
        (LATENT, 0, M.MLP, 3 * 18432 * 2),
        (LATENT, -1, M.EXPERT_ACTIVATION, 8 * 2048 * 2),
        (LATENT, 0, M.EXPERT_ACTIVATION, 0),
        (LATENT, -1, M.EXPERTS, 8 * 7168 * 2 + 8 * 3 * 2048 * 2 + 3 * 2048 * 2 + 2 * 256 * 4),
    ],
)
def test_a_module_frees_what_it_makes_anew(model: Model, layer: int, module: RecomputeModule, expected: float) -> None:
    assert freed(model, MEGATRON_CORE, module, layer=layer) == pytest.approx(expected)


def test_without_flash_attention_the_scores_stay_unless_the_core_is_recomputed() -> None:
    unfused = Framework(flash_attention=False)
    scores = DENSE.heads * SEQ * 2
    assert freed(DENSE, unfused, M.CORE) == scores
    assert freed(DENSE, unfused) == scores  # selective without modules means the core
    assert freed(DENSE, unfused, M.MLP) == 3 * 14336 * 2
    assert freed(DENSE, unfused, M.CORE, M.MLP) == scores + 3 * 14336 * 2


def test_plain_kernels_free_the_activated_gate_too() -> None:
    plain = Framework(kernels=Kernels.PLAIN)
    assert freed(EXPERTS, plain, M.EXPERT_ACTIVATION) == 2 * 2 * 14336 * 2


def test_an_activation_inside_the_experts_product_is_not_recomputed() -> None:
    assert freed(LATENT, Framework(fused_experts=True), M.EXPERT_ACTIVATION) == 0


def test_what_was_freed_is_back_while_its_half_runs_backward() -> None:
    """An MLP's tensors, and as ever the gradients of its two sides; attention's own need is less."""
    block = DENSE.blocks[0]
    without, with_mlp = (count_saved(DENSE, one, block) for one in (ALONE, selective(ALONE, M.MLP)))
    assert with_mlp.transient == without.transient
    assert with_mlp.again == without.saved - with_mlp.saved
    assert without.again == 0


@pytest.mark.parametrize("model", [DENSE, EXPERTS, LATENT, HYBRID], ids=lambda model: model.name)
@pytest.mark.parametrize("flash", [True, False])
@pytest.mark.parametrize("kernels", [Kernels.FUSED, Kernels.PLAIN])
def test_more_modules_never_need_more(model: Model, flash: bool, kernels: Kernels) -> None:
    """Of a layer, and of a stage however few layers and micro-batches it has."""
    framework = Framework(flash_attention=flash, kernels=kernels)
    small = model if model.hybrid else model.with_layers(5)
    sets = [modules for size in range(len(M) + 1) for modules in combinations(M, size)]
    totals: dict[frozenset[RecomputeModule], float] = {}
    for modules in sets:
        chosen = selective(ALONE, *modules) if modules else ALONE
        totals[frozenset(modules)] = memory(small, chosen, B200, framework)[0].total
        for block in set(small.blocks):
            kept = count_saved(small, chosen, block, framework)
            assert kept.saved >= kept.input
            assert kept.saved + kept.again <= count_saved(small, ALONE, block, framework).saved * (1 + 1e-12)
    for chosen_modules, total in totals.items():
        for module in chosen_modules:
            assert total <= totals[chosen_modules - {module}] * (1 + 1e-12)


@pytest.mark.parametrize("model", [DENSE, EXPERTS, LATENT], ids=lambda model: model.name)
@pytest.mark.parametrize("module", [module for module in M if module is not M.CORE])
def test_memory_is_freed_where_time_is_spent(model: Model, module: RecomputeModule) -> None:
    """A module that the backward of no layer runs again frees nothing, and the other way round."""
    layers = generate(model, ALONE).stages[0].body_layers()
    again = recompute_modules(layers, (module,)) != layers
    assert again == any(freed(model, MEGATRON_CORE, module, layer=layer) > 0 for layer in (0, -1))


def test_losses_of_mtp_layers_wait_for_that_of_the_next() -> None:
    softmax = SEQ * LATENT.padded_vocab(1) * 4
    one, two = replace(ALONE, mtp_layers=1), replace(ALONE, mtp_layers=2)
    assert loss_bytes(LATENT, one) - loss_bytes(LATENT, ALONE) == softmax
    assert loss_bytes(LATENT, two) - loss_bytes(LATENT, one) == softmax
    assert loss_bytes(LATENT, one, in_flight=3) - loss_bytes(LATENT, ALONE, in_flight=3) == 3 * softmax


def test_a_further_token_keeps_a_block_and_its_ends() -> None:
    """The embedding, two normed streams side by side, input and output of the last norm."""
    one, two = (memory(LATENT, replace(ALONE, mtp_layers=n), B200)[0] for n in (1, 2))
    block = count_saved(LATENT, ALONE, LATENT.next_token_blocks[0])
    assert two.activations - one.activations == pytest.approx(block.saved + 5 * SEQ * LATENT.hidden * 2)
    assert two.parameters == one.parameters


def test_sequence_parallelism_shares_the_ends_of_a_further_token() -> None:
    """Each of four tensor ranks saves a quarter of the tensors before and after the block."""
    shared = replace(ALONE, layout=Layout(tp=4), sequence_parallel=True)
    one, two = (memory(LATENT, replace(shared, mtp_layers=n), B200)[0] for n in (1, 2))
    block = count_saved(LATENT, shared, LATENT.next_token_blocks[0])
    assert two.activations - one.activations == pytest.approx(block.saved + 5 * SEQ * LATENT.hidden * 2 / 4)
