"""Random small models: products, norms, views and sums in any order, down to a loss."""

from __future__ import annotations

import math

from hypothesis import strategies as st

from meshwright.spec import Extent, Graph, Layer, Op, Tensor

TOKENS, WIDTHS, NONE = 8, (4, 8, 16), Extent()


class Maker:
    """A graph that grows op by op; shapes are those of one sample behind its dim 0."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self.ops: list[Op] = []
        self.input = self.tensor("x", (Extent(0, 1), Extent(TOKENS), Extent(8)), "input")

    def tensor(self, name, shape, role="activation", storage=None) -> int:
        number = len(self.tensors)
        made = Tensor(
            name=f"{name}{number}",
            shape=tuple(shape),
            dtype="float32",
            role=role,
            storage=number if storage is None else storage,
            requires_grad=role != "input",
        )
        self.tensors.append(made)
        return number

    def parameter(self, *shape: int) -> int:
        return self.tensor("weight", map(Extent, shape), "parameter")

    def op(self, kind: str, inputs, *shapes, saved=(), view=False, flops=NONE, **attributes) -> list[int]:
        storage = self.tensors[inputs[0]].storage if view else None
        outputs = [self.tensor("y", shape, storage=storage) for shape in shapes]
        self.ops.append(
            Op(
                name=f"op{len(self.ops)}",
                kind=f"aten.{kind}",
                inputs=tuple(inputs),
                outputs=tuple(outputs),
                attributes=tuple((name, str(value)) for name, value in attributes.items()),
                flops=flops,
                backward_flops=Extent(2 * flops.fixed, 2 * flops.per_sample),
                saved=tuple(saved),
            )
        )
        return outputs

    def shape(self, tensor: int) -> tuple[Extent, ...]:
        return self.tensors[tensor].shape

    def graph(self, output: int) -> Graph:
        return Graph(
            name="random",
            tensors=tuple(self.tensors),
            ops=tuple(self.ops),
            layers=(Layer(name="all", start=0, stop=len(self.ops)),),
            inputs=(self.input,),
            outputs=(output,),
            has_loss=True,
        )


def linear(draw, make: Maker, x: int) -> int:
    *front, inner = make.shape(x)
    outer, bias = draw(st.sampled_from(WIDTHS)), draw(st.booleans())
    weights = [make.parameter(outer, inner.fixed), *([make.parameter(outer)] if bias else [])]
    flops = Extent(0, 2 * outer * inner.fixed * math.prod(extent.at(1) for extent in front))
    return make.op("linear.default", [x, *weights], (*front, Extent(outer)), saved=[x], flops=flops)[0]


def norm(draw, make: Maker, x: int) -> int:
    last = make.shape(x)[-1]
    weights = [make.parameter(last.fixed), make.parameter(last.fixed)]
    return make.op("layer_norm.default", [x, *weights], make.shape(x), saved=[x], normalized_shape=f"[{last}]")[0]


def pointwise(draw, make: Maker, x: int) -> int:
    kind = draw(st.sampled_from(("gelu.default", "tanh.default", "softmax.int")))
    more = {"dim": draw(st.sampled_from((-1, 1)))} if kind == "softmax.int" else {}
    return make.op(kind, [x], make.shape(x), saved=[x], **more)[0]


def heads(draw, make: Maker, x: int) -> int:
    *front, last = make.shape(x)
    if len(front) != 2:
        return x
    count = draw(st.sampled_from((2, 4)))
    parts = (Extent(count), Extent(last.fixed // count))
    (y,) = make.op("unflatten.int", [x], (*front, *parts), view=True, dim=-1, sizes=[count, -1])
    (y,) = make.op("transpose.int", [y], (front[0], parts[0], front[1], parts[1]), view=True, dim0=1, dim1=2)
    (y,) = make.op("scaled_dot_product_attention.default", [y, y, y], make.shape(y), saved=[y])
    (y,) = make.op("transpose.int", [y], (*front, *parts), view=True, dim0=1, dim1=2)
    return make.op("flatten.using_ints", [y], (*front, last), view=True, start_dim=2)[0]


def gate(draw, make: Maker, x: int) -> int:
    *front, last = make.shape(x)
    half = (*front, Extent(last.fixed // 2))
    one, two = make.op("chunk.default", [x], half, half, view=True, chunks=2, dim=-1)
    return make.op("mul.Tensor", [one, two], half, saved=[one, two])[0] if last.fixed >= 8 else x


def turn(draw, make: Maker, x: int) -> int:
    first, second, third = make.shape(x)
    (y,) = make.op("transpose.int", [x], (first, third, second), view=True, dim0=1, dim1=2)
    return make.op("matmul.default", [x, y], (first, second, second), saved=[x, y])[0]


@st.composite
def random_graphs(draw) -> Graph:
    make = Maker()
    made = [linear(draw, make, make.input)]
    for step in draw(
        st.lists(st.sampled_from((linear, linear, norm, pointwise, heads, gate, turn, "add")), max_size=7)
    ):
        x = draw(st.sampled_from(made[-3:]))
        if step == "add":
            others = [y for y in made if make.shape(y) == make.shape(x)]
            made.append(make.op("add.Tensor", [x, draw(st.sampled_from(others))], make.shape(x))[0])
        else:
            made.append(step(draw, make, x))
    (loss,) = make.op("mean.default", [make.op("exp.default", [made[-1]], make.shape(made[-1]))[0]], ())
    return make.graph(loss)
