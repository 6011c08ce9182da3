"""Forward and backward of a Llama layer's parts, tensor by tensor: see tensors.

Names: what a forward keeps is a dict entry of the micro-batch, under the part and its layer.
"""

from stepcast.optimus.memory.tensors import StageTensors

Kept = dict[object, list[int]]


def norm_forward(stage: StageTensors, kept: Kept, name: object) -> None:
    """Root-mean-square norm: kept are the root, the normalised value and the result."""
    square = stage.new(stage.wide)
    mean = stage.new(stage.unit)
    stage.drop(square)
    shifted = stage.new(stage.unit)
    stage.drop(mean)
    root = stage.new(stage.unit)
    stage.drop(shifted)
    kept["norm", name] = [root, stage.new(stage.wide), stage.new(stage.wide)]


def norm_backward(stage: StageTensors, kept: Kept, name: object, gradient: int, skip: int | None) -> int:
    """From the gradient of the result to that of the input, with the residual's *skip* added."""
    root, normal = kept.pop(("norm", name))
    scaled, product = stage.new(stage.wide), stage.new(stage.wide)
    stage.drop(gradient)
    stage.weight_gradient(name)
    stage.drop(product, normal)
    direct, product = stage.new(stage.wide), stage.new(stage.wide)
    to_root = stage.new(stage.unit)
    stage.drop(product, scaled, root)
    double, to_square = stage.new(stage.wide), stage.new(stage.wide)
    stage.drop(to_root, double)
    result = stage.new(stage.wide)
    stage.drop(direct, to_square)
    if skip is None:
        return result
    total = stage.new(stage.wide)
    stage.drop(result, skip)
    return total


def norm_result(stage: StageTensors, kept: Kept, name: object) -> None:
    """The projections' gradients are done: what they were given can go."""
    stage.drop(kept["norm", name].pop())


def attention_forward(stage: StageTensors, kept: Kept, layer: int) -> int:
    """To the residual behind the attention."""
    shape, new = stage.shape, stage.new
    query, key = stage.unit * shape.query, stage.unit * shape.key
    norm_forward(stage, kept, ("attention", layer))
    projected = new(query), new(key), new(key)
    queries, factors = _rotated(stage, projected[0], query)
    keys, more = _rotated(stage, projected[1], key)
    kept["rotary", layer] = factors + more
    repeated = [new(query)]
    stage.drop(keys)
    repeated.append(new(query))
    stage.drop(projected[2])
    repeated.insert(0, new(query))
    stage.drop(queries)
    if stage.seq % 8:
        repeated.append(new(stage.mask))
    rows = -(-stage.seq // 32) * 32
    result = new(query)
    sums = new(shape.micro_batch * shape.heads * rows * 4)
    kept["attention", layer] = [*repeated, sums, result]
    output = stage.reduced(new(stage.wide))
    residual = new(stage.wide)
    stage.drop(output)
    return residual


def _rotated(stage: StageTensors, block: int, size: int) -> tuple[int, list[int]]:
    """x cos + rotate(x) sin; both factors are kept where the tables ask for gradients."""
    straight, half = stage.new(size), stage.new(size // 2)
    turned = stage.new(size)
    stage.drop(half)
    crossed = stage.new(size)
    if stage.shape.first:
        stage.drop(turned)
    result = stage.new(size)
    stage.drop(straight, crossed)
    if stage.shape.first:
        stage.drop(block)
        return result, []
    return result, [block, turned]


def attention_backward(stage: StageTensors, kept: Kept, layer: int, gradient: int) -> int:
    shape, new = stage.shape, stage.new
    query, key = stage.unit * shape.query, stage.unit * shape.key
    to_result = new(query)
    stage.weight_gradient(("o", layer))
    to_query, to_key, to_value = new(query), new(query), new(query)
    if not shape.first:
        stage.drop(new(stage.scores), new(stage.mask))
    stage.drop(to_result, *kept.pop(("attention", layer)))
    keys = new(key)
    stage.drop(to_key)
    values = new(key)
    stage.drop(to_value)
    queries, keys = _rotated_backward(stage, to_query, query), _rotated_backward(stage, keys, key)
    stage.drop(*kept.pop(("rotary", layer)))
    total = -1
    for block, name in ((values, "v"), (keys, "k"), (queries, "q")):
        part = new(stage.wide)
        stage.weight_gradient((name, layer))
        stage.drop(block)
        part = stage.reduced(part)
        total = part if total < 0 else _sum(stage, total, part)
    norm_result(stage, kept, ("attention", layer))
    return norm_backward(stage, kept, ("attention", layer), total, gradient)


def _sum(stage: StageTensors, one: int, other: int) -> int:
    total = stage.new(stage.wide)
    stage.drop(one, other)
    return total


def _rotated_backward(stage: StageTensors, gradient: int, size: int) -> int:
    straight = stage.new(size)
    if not stage.shape.first:  # those of the tables
        stage.drop(stage.new(size))
        stage.drop(stage.new(size))
    crossed = stage.new(size)
    turned = stage.new(size)
    stage.drop(crossed)
    result = stage.new(size)
    stage.drop(straight, turned, gradient)
    return result


def up_forward(stage: StageTensors, kept: Kept, layer: int) -> list[int]:
    """The activated gate and the up projection's output."""
    norm_forward(stage, kept, ("up", layer))
    gate, activated = stage.new(stage.inner), stage.new(stage.inner)
    kept["up", layer] = [gate]
    return [activated, stage.new(stage.inner)]


def up_backward(stage: StageTensors, kept: Kept, layer: int, gradients: list[int], skip: int) -> int:
    to_activated, to_up = gradients
    by_up = stage.new(stage.wide)
    stage.weight_gradient(("up_proj", layer))
    stage.drop(to_up)
    by_up = stage.reduced(by_up)
    to_gate = stage.new(stage.inner)
    stage.drop(to_activated, *kept.pop(("up", layer)))
    by_gate = stage.new(stage.wide)
    stage.weight_gradient(("gate", layer))
    stage.drop(to_gate)
    total = _sum(stage, by_up, stage.reduced(by_gate))
    norm_result(stage, kept, ("up", layer))
    return norm_backward(stage, kept, ("up", layer), total, skip)


def down_forward(stage: StageTensors, kept: Kept, layer: int, factors: list[int]) -> int:
    product = stage.new(stage.inner)
    output = stage.reduced(stage.new(stage.wide))
    kept["down", layer] = [product, *factors]
    return output


def down_backward(stage: StageTensors, kept: Kept, layer: int) -> tuple[list[int], list[int]]:
    """Gradients of the activated gate and the up projection's output, and these themselves."""
    product, *factors = kept.pop(("down", layer))
    to_product = stage.new(stage.inner)
    stage.weight_gradient(("down_proj", layer))
    stage.drop(product)
    gradients = [stage.new(stage.inner), stage.new(stage.inner)]
    stage.drop(to_product)
    return gradients, factors
