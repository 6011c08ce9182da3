"""What the end of a model needs: the logits and their gradient, and modules for further tokens."""

from stepcast.ir.dtype import FP32_BYTES, DType
from stepcast.ir.framework import MEGATRON_CORE, Framework, Kernels, LossKernel, Modules
from stepcast.ir.model import Model
from stepcast.ir.sharding import plan_of
from stepcast.ir.strategy import Strategy, TrainingKind

# torch.compile pads a matmul whose width is not a multiple of this: logits and their gradient are copied.
ALIGNED = 8


def loss_bytes(
    model: Model, strategy: Strategy, in_flight: int = 1, framework: Framework = MEGATRON_CORE, waiting: int = 0
) -> float:
    """Return the most that logits, softmax and their gradients take at once, with the projection's gradient.

    *in_flight* micro-batches keep their softmax; one of them is at work. So do the losses of further tokens:
    Megatron-Core computes them before that of the next token, which is the first to run backward.
    *waiting* more have run their input gradient and wait for the weight gradient of a zero-bubble schedule:
    autograd has freed their softmax, and the projection keeps its input and the gradient of its output, the
    logits, in the training precision (github.com/sail-sg/zero-bubble, WeightGradStore.put in
    megatron/core/tensor_parallel/layers.py).
    """
    tp, kernels = strategy.layout.tp, framework.kernels
    vocab = model.padded_vocab(tp)
    logits = strategy.local_tokens * vocab / tp
    kept = logits * FP32_BYTES * max(0, in_flight * (1 + strategy.further_tokens) - 1)
    element = strategy.stored.bytes
    kept += logits * element * waiting * (1 + strategy.further_tokens)
    if strategy.layout.pp > 1:
        kept += logits * element * min(framework.deferred_gradients, strategy.micro_batches)
    if kernels is Kernels.PLAIN:
        # The softmax, and the gradients before and after it; the logits may be gone.
        capped = element if framework.writes_out and model.logit_softcap else 0.0
        return kept + (3 * FP32_BYTES + capped + (element if framework.keeps_logits else 0.0)) * logits
    if kernels is Kernels.COMPILED:
        if plan_of(strategy, framework).by_unit:
            # Layers are compiled one by one and the loss is not; the logits outlive it.
            return kept + (3 * FP32_BYTES + element) * logits
        if framework.modules is Modules.TRANSFORMERS:
            # The logits, from which its loss function has their gradient made in fp32.
            return kept + logits * (element + FP32_BYTES)
        return kept + logits * element * (1 if vocab % ALIGNED == 0 else 3)
    width = model.embedding_width or model.hidden
    weight = vocab / tp * width * element if strategy.training is TrainingKind.FULL else 0.0
    narrow = element if strategy.stored is not DType.FP32 else 0.0
    if framework.loss is LossKernel.ENGINE:
        return kept + element * logits + weight
    if framework.loss is LossKernel.IN_PLACE:
        # Logits or their gradient beside the fp32 copy; that is gone when the weight's gradient is made.
        return kept + max((FP32_BYTES + narrow) * logits, element * logits + weight)
    # Logits, their fp32 copy and softmax; then the gradient in both formats and the weight's.
    return kept + (2 * FP32_BYTES + narrow) * logits + weight


def further_ends_bytes(model: Model, strategy: Strategy) -> float:
    """What a module for one further token keeps around its block: the token's embedding, which is normed, the
    two norms' results side by side, which the projection needs, and input and output of the last norm.
    The stream it starts from is kept already, by what made it.
    """
    outer = strategy.local_tokens * model.hidden // strategy.outer_ways
    return (1 + 2 + 2) * outer * strategy.stored.bytes
