"""Graphs for the on-device checks: every kind of sweep, at sizes that suit no vector or tile."""

from __future__ import annotations

BATCH = "B"


class Graph:
    """Writes docs/graph-format.md."""

    def __init__(self, name: str):
        self.name = name
        self.values: list[dict] = []
        self.results: list[dict] = []
        self.shapes: list[tuple[list, str]] = []

    def add(self, **value) -> int:
        self.values.append(value)
        return len(self.values) - 1

    def leaf(self, role: str, name: str, shape: list, dtype: str = "f32") -> int:
        return self.add(op=role, name=name, dtype=dtype, shape=shape)

    def op(self, op: str, *args: int, **attributes) -> int:
        value = {"op": op, "args": list(args), "origin": op}
        if attributes:
            value["attributes"] = attributes
        return self.add(**value)

    def constant(self, value: float) -> int:
        return self.add(op="constant", value=value)

    def result(self, value: int, shape: list, name: str = "y", dtype: str = "f32") -> None:
        self.results.append({"value": value, "name": name})
        self.shapes.append((shape, dtype))

    def json(self) -> dict:
        """The graph; `result_shapes`, which the library does not read, are for the caller."""
        return {
            "ingot_graph": 1,
            "name": self.name,
            "values": self.values,
            "results": self.results,
            "updates": [],
            "result_shapes": self.shapes,
        }


def linear(graph: Graph, k: int, n: int, rows: int = 1, bias: bool = True, dtype: str = "f32"):
    x = graph.leaf("input", "x", [BATCH, rows, 1, k], dtype)
    w = graph.leaf("parameter", "weight", [1, n, 1, k], dtype)
    y = graph.op("matmul", x, w, transpose_b=True)
    if bias:
        y = graph.op("add", y, graph.leaf("parameter", "bias", [1, 1, 1, n], dtype))
    return y


def batch_norm(graph: Graph, x: int, shape: list, training=True, momentum=0.1, axes=("batch",)):
    leaves = [
        graph.leaf("parameter", "bn.weight", shape),
        graph.leaf("parameter", "bn.bias", shape),
        graph.leaf("buffer", "bn.running_mean", shape),
        graph.leaf("buffer", "bn.running_var", shape),
        graph.leaf("buffer", "bn.num_batches_tracked", [1, 1, 1, 1], "i64"),
    ]
    attributes = {"training": training, "eps": 1e-5, "axes": list(axes)}
    if momentum is not None:
        attributes["momentum"] = momentum
    return graph.op("batch_norm", x, *leaves, **attributes)


def gemm_scale_bn(k: int, n: int, training=True, momentum=0.1) -> dict:
    g = Graph("gemm_scale_bn")
    y = linear(g, k, n)
    y = g.op("mul", y, g.leaf("parameter", "scale", [1, 1, 1, n]))
    g.result(batch_norm(g, y, [1, 1, 1, n], training, momentum), [BATCH, 1, 1, n])
    return g.json()


def gemm_bn_scale_softmax(k: int, n: int, training=True) -> dict:
    g = Graph("gemm_bn_scale_softmax")
    y = batch_norm(g, linear(g, k, n), [1, 1, 1, n], training)
    y = g.op("mul", g.leaf("parameter", "scale", [1, 1, 1, 1]), y)
    g.result(g.op("softmax", y, axes=["features"]), [BATCH, 1, 1, n])
    return g.json()


def reduced(finish: str, axes: list[str], n: int, k: int = 64) -> dict:
    g = Graph(f"linear_{finish}")
    y = g.op("reduce", linear(g, k, n), finish=finish, axes=axes)
    shape = [1 if "batch" in axes else BATCH, 1, 1, 1 if "features" in axes else n]
    g.result(y, shape, dtype="i64" if finish == "argmax" else "f32")
    return g.json()


def group_norm_softmax(groups: int, n: int, k: int = 64) -> dict:
    g = Graph("group_norm_softmax")
    y = g.op("view", linear(g, k, n), shape=[BATCH, 1, groups, n // groups])
    mean = g.op("reduce", y, finish="mean", axes=["features"])
    variance = g.op("reduce", y, finish="variance", axes=["features"])
    scale = g.op("rsqrt", g.op("add", variance, g.constant(1e-5)))
    y = g.op("mul", g.op("sub", y, mean), scale)
    y = g.op("view", y, shape=[BATCH, 1, 1, n])
    g.result(g.op("softmax", y, axes=["features"]), [BATCH, 1, 1, n])
    return g.json()


def residual_layer_norm(n: int, rows: int) -> dict:
    g = Graph("residual_layer_norm")
    y = linear(g, n, n, rows)
    y = g.op("add", y, g.leaf("input", "residual", [BATCH, rows, 1, n]))
    mean = g.op("reduce", y, finish="mean", axes=["features"])
    variance = g.op("reduce", y, finish="variance", axes=["features"])
    y = g.op("mul", g.op("sub", y, mean), g.op("rsqrt", g.op("add", variance, g.constant(1e-5))))
    y = g.op("mul", y, g.leaf("parameter", "gamma", [1, 1, 1, n]))
    g.result(g.op("softmax", y, axes=["features"]), [BATCH, rows, 1, n])
    return g.json()


def residual(n: int, rows: int, groups: int = 1, behind: str = "", dtype: str = "f32") -> dict:
    """x + t; or a layer norm of it, or a softmax, with the sum stored too."""
    g = Graph(f"residual_{behind or 'map'}")
    shape = [BATCH, rows, groups, n]
    y = g.op("add", g.leaf("input", "x", shape, dtype), g.leaf("input", "t", shape, dtype))
    g.result(y, shape, "sum", dtype)
    if behind:
        norm = behind == "layer_norm"
        names = ("gamma", "beta") if norm else ()
        leaves = [g.leaf("parameter", name, [1, 1, 1, n], dtype) for name in names]
        g.result(g.op(behind, y, *leaves, axes=["features"]), shape, "y", dtype)
    return g.json()


def layer_norm(n: int, rows: int, groups: int, dtype: str = "f32") -> dict:
    g = Graph("layer_norm")
    shape = [BATCH, rows, groups, n]
    leaves = [g.leaf("parameter", name, [1, 1, 1, n], dtype) for name in ("gamma", "beta")]
    x = g.leaf("input", "t", shape, dtype)
    g.result(g.op("layer_norm", x, *leaves, axes=["features"]), shape, "y", dtype)
    return g.json()


def channel_norm(channels: int, length: int) -> dict:
    """BatchNorm1d over [N, C, L]: statistics over batch and length."""
    g = Graph("channel_norm")
    y = linear(g, length, length, channels, bias=False)
    y = batch_norm(g, y, [1, channels, 1, 1], axes=("batch", "features"))
    g.result(y, [BATCH, channels, 1, length])
    return g.json()


def pointwise_chain(k: int, n: int) -> dict:
    g = Graph("pointwise_chain")
    y = linear(g, k, n)
    y = g.op("mul", g.op("sigmoid", y), g.op("tanh", y))
    y = g.op("add", y, g.leaf("input", "per_row", [BATCH, 1, 1, 1]))
    y = g.op("maximum", y, g.constant(-0.25))
    g.result(y, [BATCH, 1, 1, n])
    return g.json()


def pooled(n: int, window: int, k: int = 64) -> dict:
    g = Graph("pooled")
    y = g.op("view", linear(g, k, n), shape=[BATCH, 1, n // window, window])
    y = g.op("reduce", y, finish="max", axes=["features"])
    g.result(y, [BATCH, 1, n // window, 1])
    g.result(g.op("reduce", y, finish="sum", axes=["groups"]), [BATCH, 1, 1, 1], "total")
    return g.json()


def running_sums(rows: int, n: int, k: int = 64) -> dict:
    """Behind an epilogue, with results of its own and of what follows."""
    g = Graph("running_sums")
    y = g.op("mul", g.op("relu", linear(g, k, rows * n)), g.constant(0.25))
    y = g.op("view", y, shape=[BATCH, rows, 1, n])
    sums = g.op("cumsum", y)
    g.result(sums, [BATCH, rows, 1, n], "sums")
    g.result(g.op("softmax", g.op("sub", y, g.op("tanh", sums))), [BATCH, rows, 1, n])
    again = g.op("cumsum", g.op("sub", sums, y))
    g.result(again, [BATCH, rows, 1, n], "again")
    return g.json()


def two_linears(k: int, n: int) -> dict:
    g = Graph("two_linears")
    y = g.op("relu", linear(g, k, n))
    w = g.leaf("parameter", "weight2", [1, n, 1, k])
    g.result(g.op("matmul", y, w, transpose_b=False), [BATCH, 1, 1, k])
    return g.json()


def zoo() -> dict[str, tuple[dict, list[int]]]:
    """Graphs by name, with the batch sizes to run them at."""
    odd = [2, 3, 65, 257]
    return {
        "gemm_scale_bn": (gemm_scale_bn(64, 96), odd),
        "gemm_scale_bn odd": (gemm_scale_bn(67, 131), odd),
        "gemm_scale_bn cumulative": (gemm_scale_bn(64, 96, momentum=None), [8]),
        "gemm_scale_bn eval": (gemm_scale_bn(64, 96, training=False), [1, 33]),
        "gemm_bn_scale_softmax": (gemm_bn_scale_softmax(128, 256), odd),
        "gemm_bn_scale_softmax odd": (gemm_bn_scale_softmax(33, 1001), odd),
        "gemm_bn_scale_softmax long": (gemm_bn_scale_softmax(32, 40000), [5]),
        "log_sum_exp": (reduced("log_sum_exp", ["features"], 1000), [1, 7, 300]),
        "argmax": (reduced("argmax", ["features"], 130), [1, 9]),
        "max": (reduced("max", ["features"], 8), [1, 1000]),
        "min columns": (reduced("min", ["batch"], 96), [1, 700]),
        "sum all": (reduced("sum", ["batch", "features"], 96), [1, 700]),
        "columns log_sum_exp": (reduced("log_sum_exp", ["batch"], 100), [3, 500]),
        "group_norm_softmax": (group_norm_softmax(8, 96), [1, 65]),
        "residual_layer_norm": (residual_layer_norm(96, 3), [1, 50]),
        "residual_layer_norm odd": (residual_layer_norm(61, 5), [1, 50]),
        "tokens layer_norm": (residual(768, 49, behind="layer_norm"), [1, 3]),
        "tokens layer_norm odd": (residual(333, 5, 7, "layer_norm"), [1, 3]),
        "tokens layer_norm long": (residual(4096, 3, 3, "layer_norm"), [1, 2]),
        "matrix softmax": (residual(520, 1, behind="softmax"), [7, 8, 61]),
        "tokens residual": (residual(768, 49), [1, 3]),
        "tokens residual odd": (residual(61, 3, 5), [1, 33]),
        "channel_norm": (channel_norm(12, 40), [2, 33]),
        "pointwise_chain": (pointwise_chain(48, 100), [1, 77]),
        "pooled": (pooled(96, 4), [1, 33]),
        "running_sums": (running_sums(1, 1000), [1, 65]),
        "running_sums short": (running_sums(7, 61), [1, 65]),
        "running_sums long": (running_sums(1, 20000, 32), [5]),
        "two_linears": (two_linears(64, 128), [1, 100]),
    }
