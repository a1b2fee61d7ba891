"""PyTorch's own product behind libingot's product interface."""

import ctypes

import pytest

torch = pytest.importorskip("torch")

from ingot.runtime import host_product  # noqa: E402

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]


def call(function, a, b, transpose_b, context=None):
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


def test_torch_product_refuses_what_it_cannot():
    assert host_product.torch_product(1, 1, 1, 0, 1, 0, 1, 1, 0, 1, 9, None) == 1
    assert host_product.torch_product(0, 1, 1, 0, 1, 0, 1, 1, 0, 1, 0, None) == 1


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
