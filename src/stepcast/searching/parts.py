"""How often the parts of a model, its kinds of blocks and its two ends, lie in each piece of a pipeline."""

import numpy as np

from stepcast.ir.arrays import FloatArray
from stepcast.ir.stages import pieces
from stepcast.searching.layers import kinds_of
from stepcast.searching.legal import pipeline_of
from stepcast.searching.space import Space


def counts_of(space: Space, at: int) -> FloatArray:
    """pieces x parts of candidate *at*: the kinds of blocks, the embedding, the head."""
    model, kinds = space.model, kinds_of(space.model)
    return np.array(
        [
            [
                *(model.blocks[piece.layers.start : piece.layers.stop].count(kind) for kind in kinds),
                piece.embedding,
                piece.head,
            ]
            for piece in pieces(model, pipeline_of(space, at))
        ],
        dtype=np.float64,
    )
