"""Attention written out in PyTorch: transformers' eager_attention_forward, and GPT-OSS's with its sinks."""

from dataclasses import dataclass

from stepcast.generate.by_operation import capped
from stepcast.generate.parts import K, Ops, cast, dropped, dropped_gradient
from stepcast.generate.sizes import Sizes
from stepcast.ir.coded import falls_back, selects_heads, widens_softmax
from stepcast.ir.dtype import DType
from stepcast.ir.model_parts import PositionKind
from stepcast.ir.work import ElementwiseKind, Matmul, elementwise
from stepcast.ir.workload import Op

FP32 = DType.FP32


@dataclass(frozen=True, slots=True)
class WrittenCore:
    """The whole square is computed and stored, keys and values are repeated for every head."""

    sizes: Sizes
    query_len: int
    key_len: int
    heads: int
    kv_heads: int

    @property
    def batch(self) -> int:
        return self.sizes.strategy.micro_batch * self.heads

    def forward(self) -> Ops:
        value = self.sizes.model.value_dim
        scores = Matmul(self.query_len, self.key_len, self.sizes.model.head_dim, self.batch, self._dtype)
        # A sink makes rows one longer, which products of what is left of them have to step over.
        row = self.key_len + self.sizes.model.attention_sinks
        values = Matmul(self.query_len, value, row, self.batch, self._dtype)
        return (
            *self._apart(),
            *self.repeated(),
            *((self._over("bias", K.BROADCAST, 0),) if self._biased else ()),
            Op("scores", scores),
            *(() if self._fallen_back else (self._over("scale", K.MUL, 1),)),
            *(self._caps()[0]),
            self._over("mask", K.BROADCAST, 1),
            *self._softmax(),
            *self._saved(),
            Op("values", values),
            self._joined("join heads"),
        )

    def backward(self) -> Ops:
        head, value, length = self.sizes.model.head_dim, self.sizes.model.value_dim, self.query_len
        row = self.key_len + self.sizes.model.attention_sinks
        return (
            self._joined("join heads gradient"),
            Op("probability gradient", Matmul(length, self.key_len, value, self.batch, self._dtype)),
            Op("value gradient", Matmul(row, value, length, self.batch, self._dtype)),
            *self._softmax_gradient(),
            *(self._caps()[1]),
            *self._scale_gradient(),
            Op("query gradient", Matmul(length, head, self.key_len, self.batch, self._dtype)),
            Op("key gradient", Matmul(self.key_len, head, length, self.batch, self._dtype)),
            *self.repeated_gradient(),
        )

    def _apart(self) -> Ops:
        """Queries, keys and values copied out of the product that made them, where nothing else does."""
        if not self._biased:
            return ()
        rows, width = self.sizes.strategy.micro_batch * self.query_len, self.heads * self.sizes.model.head_dim
        return tuple(
            Op(f"{what} apart", elementwise(K.BROADCAST, rows, width, 1, 1, self._dtype))
            for what in ("query", "key", "value")
        )

    def _scale_gradient(self) -> Ops:
        """Of the scores; BLOOM's product scales as it adds the bias, and so do those of its gradient, and
        PyTorch's own operations scale queries and keys.
        """
        if selects_heads(self.sizes.model) or self._fallen_back:
            return ()
        return (self._over("scale gradient", K.BROADCAST if self.sizes.model.attention_sinks else K.MUL, 1),)

    def repeated(self) -> Ops:
        """Keys and values as wide as queries; where heads share them."""
        if self.heads == self.kv_heads:
            return ()
        rows = self.sizes.strategy.micro_batch * self.key_len
        return tuple(
            Op(f"{what} repeat", elementwise(K.BROADCAST, rows, self.heads * width, 1, 1, self._dtype))
            for what, width in self._widths.items()
        )

    def repeated_gradient(self) -> Ops:
        if self.heads == self.kv_heads:
            return ()
        rows = self.batch * self.key_len
        return tuple(
            Op(f"{what} repeat gradient", elementwise(K.ROW_SUM, rows, width, 1, 0, self._dtype))
            for what, width in self._widths.items()
        )

    def _softmax(self) -> Ops:
        sizes, columns = self.sizes, self.key_len
        if sizes.model.attention_sinks:
            ops: Ops = (
                self._over("sink", K.JOIN, 1),
                self._over("largest", K.ROW_SUM, 1, 0),
                self._over("less the largest", K.BROADCAST, 1),
                Op("softmax", elementwise(K.SOFTMAX, self._rows, columns + 1, 1, 1, self._dtype)),
            )
        elif widens_softmax(sizes.model) and self._dtype is not FP32:
            ops = (
                cast(sizes, "softmax widen", self._rows, columns, self._dtype, FP32),
                Op("softmax", elementwise(K.SOFTMAX, self._rows, columns, 1, 1, FP32)),
                cast(sizes, "softmax cast", self._rows, columns, FP32, self._dtype),
            )
        else:
            ops = (self._over("softmax", K.SOFTMAX, 1),)
        if sizes.framework.dropout and sizes.model.drops_attention:
            ops += (dropped(sizes, "dropout", self._rows, columns),)
        return ops

    def _softmax_gradient(self) -> Ops:
        sizes, columns = self.sizes, self.key_len
        gradient = Op("softmax gradient", elementwise(K.SOFTMAX, self._rows, columns, 2, 1, self._dtype, True))
        if sizes.model.attention_sinks:
            ops: Ops = (
                self._over("sink gradient fill", K.FILL, 0),
                self._over("sink gradient", K.BROADCAST, 1),
                self._over("softmax gradient product", K.MUL, 2),
                gradient,
                self._over("largest gradient negate", K.MUL, 1),
                self._over("largest gradient", K.ROW_SUM, 1, 0),
                self._over("largest gradient fill", K.FILL, 0),
                self._over("largest gradient sum", K.ADD, 2),
            )
        elif widens_softmax(sizes.model) and self._dtype is not FP32:
            ops = (
                cast(sizes, "softmax gradient cast", self._rows, columns, self._dtype, FP32),
                Op("softmax gradient", elementwise(K.SOFTMAX, self._rows, columns, 2, 1, FP32, True)),
                cast(sizes, "softmax gradient narrow", self._rows, columns, FP32, self._dtype),
            )
        else:
            ops = (gradient,)
        if sizes.framework.dropout and sizes.model.drops_attention:
            ops = (dropped_gradient(sizes, "dropout gradient", self._rows, columns), *ops)
        return ops

    def _saved(self) -> Ops:
        """Of PyTorch's own softmax of attention: rows that see nothing are looked for and left at zero, and
        the probabilities are given back as narrow as the queries.
        """
        if not self._fallen_back:
            return ()
        asked = self.sizes.unquantised
        narrow = (cast(self.sizes, "probabilities", self._rows, self.key_len, FP32, asked),)
        return (
            self._over("rows of nothing", K.MUL, 1, 0.25),
            self._over("whole rows of nothing", K.ROW_SUM, 0.25, 0),
            self._over("rows of nothing cleared", K.BROADCAST, 1),
            *(narrow if asked is not FP32 else ()),
        )

    def _caps(self) -> tuple[Ops, Ops]:
        if not self.sizes.model.attention_softcap:
            return (), ()
        return capped("scores", self._rows, self.key_len, self._dtype)

    def joined(self) -> Ops:
        """After attention by one kernel, whose result lies as its queries did."""
        return (self._joined("join heads"),)

    def _joined(self, name: str) -> Op:
        """The heads of a token brought side by side, or apart again."""
        width = self.heads * self.sizes.model.value_dim
        rows = self.sizes.strategy.micro_batch * self.query_len
        return Op(name, elementwise(K.BROADCAST, rows, width, 1, 1, self._dtype))

    def _over(self, name: str, kind: ElementwiseKind, reads: float, writes: float = 1) -> Op:
        """A kernel over all scores."""
        return Op(name, elementwise(kind, self._rows, self.key_len, reads, writes, self._dtype))

    @property
    def _dtype(self) -> DType:
        return FP32 if self._fallen_back else self.sizes.unquantised

    @property
    def _fallen_back(self) -> bool:
        return falls_back(self.sizes.model, self.sizes.strategy, self.sizes.framework)

    @property
    def _biased(self) -> bool:
        """By distance: a bias written out over the whole square."""
        return self.sizes.model.position.kind is PositionKind.ALIBI

    @property
    def _rows(self) -> int:
        return self.batch * self.query_len

    @property
    def _widths(self) -> dict[str, int]:
        return {"key": self.sizes.model.head_dim, "value": self.sizes.model.value_dim}
