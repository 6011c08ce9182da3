"""Multi-token prediction (DeepSeek-V3, 2024, section 2.2): a module after the last layer predicts one more.

It looks the next token up, norms it and the stream, projects both to the hidden width, runs one block and the
head again. Several further tokens run modules one after the other; Megatron-Core puts them on the last stage.
"""

from stepcast.generate.ends import embedding_layers, head_layers
from stepcast.generate.parts import Linear, norm_layer
from stepcast.generate.sizes import Sizes
from stepcast.generate.tensor import column_layer
from stepcast.ir.workload import Layer, Role


def entry_layers(sizes: Sizes) -> tuple[Layer, ...]:
    """From the stream and the embedding of the next token to the input of the module's block."""
    hidden = sizes.model.hidden
    project = Linear("further", sizes.tokens, 2 * hidden, hidden // sizes.tp, sizes.dtype, adapted=False)
    return (
        *embedding_layers(sizes),
        norm_layer(sizes, Role.FURTHER_EMBEDDING_NORM, sizes.outer_tokens),
        norm_layer(sizes, Role.FURTHER_NORM, sizes.outer_tokens),
        column_layer(sizes, Role.FURTHER_PROJECTION, (project,), width=2 * hidden),
    )


def exit_layers(sizes: Sizes) -> tuple[Layer, ...]:
    """The norm, head and loss of the further token."""
    return head_layers(sizes)
