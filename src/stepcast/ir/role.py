"""What a layer and an op are, for rules that treat some of them apart: names are for people to read."""

from enum import StrEnum


class Role(StrEnum):
    """A layer of a generated model; its value is the layer's name."""

    EMBEDDING = "embedding"
    ATTENTION_NORM = "attention norm"
    QKV = "attention qkv"
    LATENT_DOWN = "attention down"
    LATENT_UP = "attention up"
    CORE = "attention core"
    ATTENTION_GATE = "attention gate"
    ATTENTION_OUTPUT = "attention output"
    ATTENTION_POST_NORM = "attention post norm"
    MAMBA_NORM = "mamba norm"
    MAMBA_IN = "mamba in"
    MAMBA_STEPS = "mamba steps"
    MAMBA_SCAN = "mamba scan"
    MAMBA_GROUP_NORM = "mamba group norm"
    MAMBA_OUT = "mamba out"
    MAMBA_POST_NORM = "mamba post norm"
    DELTA_NORM = "delta norm"
    DELTA_IN = "delta in"
    DELTA_RULE = "delta rule"
    DELTA_GATE_NORM = "delta gate norm"
    DELTA_OUT = "delta out"
    DELTA_POST_NORM = "delta post norm"
    MLP_NORM = "mlp norm"
    MLP_UP = "mlp up"
    MLP_DOWN = "mlp down"
    MLP_POST_NORM = "mlp post norm"
    EXPERTS_NORM = "experts norm"
    ROUTER = "experts router"
    DISPATCH = "experts dispatch"
    EXPERTS_UP = "experts up"
    EXPERTS_DOWN = "experts down"
    COMBINE = "experts combine"
    SHARED_UP = "shared experts up"
    SHARED_DOWN = "shared experts down"
    EXPERTS_SUM = "experts sum"
    EXPERTS_POST_NORM = "experts post norm"
    FURTHER_EMBEDDING_NORM = "further embedding norm"
    FURTHER_NORM = "further norm"
    FURTHER_PROJECTION = "further projection"
    FINAL_NORM = "final norm"
    HEAD_PROJECTION = "head projection"
    HEAD = "head"
    LOSS = "loss"
    GRADIENTS = "gradients"
    OPTIMIZER = "optimizer"
    PARAMETERS = "parameters"


class OpPart(StrEnum):
    """The part that an op plays in its layer."""

    PRODUCT = "product"  # with the layer's own weights, no adapter's
    ACTIVATION = "activation"  # with its gate
    RESIDUAL = "residual"  # the branch added to the stream
    SUM = "sum"  # of two branches
