"""PyTorch's own product behind libingot's product interface."""

import ctypes

import pytest

torch = pytest.importorskip("torch")

from ingot.runtime import host_product  # noqa: E402

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]


def call(function, a, b, transpose_b, context=None, row=None):
    m, k = a.shape
    n = b.shape[0] if transpose_b else b.shape[1]
    c = torch.full((m, n + 3), float("nan"), dtype=a.dtype)
    status = function(
        m,
        n,
        k,
        a.data_ptr(),
        a.stride(0),
        b.data_ptr(),
        b.stride(0),
        int(transpose_b),
        c.data_ptr(),
        c.stride(0),
        None if row is None else row.data_ptr(),
        DTYPES.index(a.dtype),
        context,
    )
    assert c[:, n:].isnan().all(), "wrote beyond its columns"
    return status, c[:, :n]


def operands(dtype, transpose_b, m=17, k=33, n=9):
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(m, k + 2, generator=generator).to(dtype)[:, :k]
    rows, columns = (n, k) if transpose_b else (k, n)
    b = torch.randn(rows, columns + 5, generator=generator).to(dtype)[:, :columns]
    expected = a.double() @ (b.double().t() if transpose_b else b.double())
    return a, b, expected


@pytest.mark.parametrize("transpose_b", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_torch_product(dtype, transpose_b):
    a, b, expected = operands(dtype, transpose_b)
    status, c = call(host_product.torch_product, a, b, transpose_b)
    assert status == 0
    torch.testing.assert_close(c.double(), expected, rtol=2e-2, atol=0.1)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_row_is_added_before_the_product_is_rounded(dtype):
    a, b, expected = operands(dtype, True)
    row = (100 * torch.randn(b.shape[0], generator=torch.Generator().manual_seed(1))).to(dtype)
    status, c = call(host_product.torch_product, a, b, True, row=row)
    once = expected + row.double()
    assert status == 0
    assert ((c.double() - once).abs() <= torch.finfo(dtype).eps / 2 * once.abs() * 1.05).all()


def test_torch_product_refuses_what_it_cannot():
    assert host_product.torch_product(1, 1, 1, 0, 1, 0, 1, 1, 0, 1, 0, 9, None) == 1
    assert host_product.torch_product(0, 1, 1, 0, 1, 0, 1, 1, 0, 1, 0, 0, None) == 1


@pytest.mark.parametrize("transpose_b", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_blas_of_pytorch_with_torch_for_the_rest(dtype, transpose_b):
    from ingot.runtime.library import IngotError, library

    try:
        loaded = library()
    except IngotError as error:
        pytest.skip(str(error))
    blas = host_product.find_blas()
    if blas is None:
        pytest.skip("this PyTorch exports no BLAS")
    callback = host_product.PRODUCT(host_product.torch_product)
    blas.other = ctypes.cast(callback, ctypes.c_void_p)
    a, b, expected = operands(dtype, transpose_b)
    status, c = call(loaded.ingot_blas_product, a, b, transpose_b, ctypes.addressof(blas))
    assert status == 0
    tolerance = 1e-5 if dtype in (torch.float32, torch.float64) else 2e-2
    torch.testing.assert_close(c.double(), expected, rtol=tolerance, atol=10 * tolerance)


def test_registration_is_named_in_doctor():
    from ingot.runtime.library import IngotError, library

    try:
        loaded = library()
    except IngotError as error:
        pytest.skip(str(error))
    name = host_product.register(loaded)
    assert name in loaded.doctor()["cpu"]["products"]


class Layer(torch.nn.Module):
    def __init__(self, behind, features=256):
        super().__init__()
        self.linear = torch.nn.Linear(features, features)
        self.behind = behind

    def forward(self, x):
        return self.behind(self.linear(x))


class Batched(Layer):
    """A product a sample, with a weight that is spread over them."""

    def forward(self, x):
        weight = self.linear.weight.t().expand(len(x), -1, -1)
        return self.behind(torch.baddbmm(self.linear.bias, x, weight))


@pytest.fixture(params=["adds", "refuses"])
def loaded(request):
    """The library, with PyTorch's product; which may find that it cannot add rows after all."""
    from ingot.runtime.library import IngotError, library

    try:
        loaded = library()
    except IngotError as error:
        pytest.skip(str(error))
    kept = host_product.torch_product
    if request.param == "refuses":

        def refusing(*given):
            return 1 if given[10] else kept(*given)

        host_product.torch_product = refusing
    host_product.register(loaded)
    yield request.param
    host_product.torch_product = kept
    host_product.register(loaded)


BEHIND = {
    "relu": torch.nn.ReLU,
    "gelu": torch.nn.GELU,
    "layer norm": lambda: torch.nn.LayerNorm(256),
    "batch norm": lambda: torch.nn.BatchNorm1d(256),
}


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("behind", BEHIND)
def test_16_bits_are_rounded_as_often_as_eagers(loaded, behind, autocast):
    compare(loaded, Layer(BEHIND[behind]()), (512, 256), autocast)


def test_a_bias_that_is_cast_beside_its_sum(loaded):
    compare(loaded, Layer(torch.nn.ReLU(), 60), (370, 60), True)


@pytest.mark.parametrize("autocast", [False, True])
def test_products_of_samples(loaded, autocast):
    compare(loaded, Batched(torch.nn.ReLU(), 64), (37, 19, 64), autocast)


def compare(loaded, module, shape, autocast):
    """Outputs and gradients; one rounding more makes other signs in front of a ReLU."""
    import copy

    import ingot

    torch.manual_seed(0)
    dtype = torch.bfloat16
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn_like(parameter) / 8)
    x, weights = torch.randn(shape), torch.randn(shape)
    if not autocast:
        module, x = module.to(dtype), x.to(dtype)
    exact = copy.deepcopy(module).double()
    ours = ingot.optimize(copy.deepcopy(module))

    def step(model, x, on):
        x = x.clone().requires_grad_()
        with torch.autocast("cpu", dtype, enabled=on):
            y = model(x)
        (y * weights.to(y.dtype)).sum().backward()
        return [y.detach(), x.grad, model.linear.weight.grad]

    truth = step(exact, x.double(), False)
    errors = [
        [float((f.double() - t).norm() / t.norm()) for f, t in zip(step(m, x, autocast), truth)]
        for m in (ours, module)
    ]
    assert ours.ingot_report()["operators_replaced"]
    slack = 1.05 if loaded == "adds" else 15.0
    assert all(mine <= slack * eagers for mine, eagers in zip(*errors)), errors
    steps = ours.ingot_report()["programs"][0]["explain"]["executable"]["program"]["steps"]
    told = [step.get("how") for step in steps if step["kind"] == "product"]
    assert told == ["adds a row before it"]
