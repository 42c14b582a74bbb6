"""Every dtype, shape and layout crosses, forward and backward, as if it had stayed."""

from __future__ import annotations

import sys

import pytest
import torch

import gradwire as gw
from gradwire.testing import cluster
from tests.leftovers import assert_nothing_left

HERE = sys.modules[__name__]
DTYPES = [
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
]
IN_BETA = "ignore:.*(Sparse CSR|ComplexHalf).*:UserWarning"


@pytest.fixture(scope="module")
def workers():
    with cluster(2, expose=[HERE]) as made:
        yield made


@pytest.fixture(autouse=True)
def _nothing_left(workers):
    yield
    assert_nothing_left(workers)


# -- what runs on the workers


def squared(x):
    return x * x


def doubled(x):
    return x * 2


def dense_squared(x):
    return x.to_dense() ** 2


def to_sparse_squared(x):
    return (x * x).to_sparse()


def to_csr(x):
    return (x * 3).to_sparse_csr()


def summed_and_itself(x):
    return x.sum(), x


def described(x):
    return str(x.dtype), tuple(x.shape), x.stride(), x.requires_grad


def one_of_each(values):
    return [value * value for value in values]


def as_real(x):
    return torch.view_as_real(x)


def total(x):
    """A real scalar of anything."""
    x = x.to_dense() if x.layout != torch.strided else x
    return (x * x.conj()).real.sum() if x.is_complex() else (x * x).sum()


def gradients(function, x, run=None):
    """The gradient of x and of what the function returned, here or on another worker."""
    leaf = x.detach().clone().requires_grad_()
    result = function(leaf) if run is None else run(function, leaf)
    result.retain_grad()
    total(result).backward()
    return result.detach(), leaf.grad, result.grad


def both(workers, function, x):
    """The same in one process and over a call."""

    def remote():
        with gw.context():
            return gradients(function, x, run=lambda fn, leaf: gw.rpc_sync("w1", fn, args=(leaf,)))

    return workers[0].run(remote), gradients(function, x)


def assert_the_same(remote, local):
    for got, want in zip(remote, local, strict=True):
        assert (got is None) == (want is None)
        if want is None:
            continue
        assert (got.dtype, got.shape, got.layout) == (want.dtype, want.shape, want.layout)
        if want.layout != torch.strided:
            got, want = got.to_dense(), want.to_dense()
        assert torch.equal(got, want)


def values(dtype, *shape):
    """Small integers, so that every dtype holds squares of them exactly."""
    count = torch.Size(shape).numel()
    real = torch.arange(1, count + 1).reshape(shape) % 5
    return (real + 1j * (real + 1) if dtype.is_complex else real).to(dtype)


# -- dtypes and shapes


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(3,), (), (0,), (2, 0, 3), (2, 3)])
def test_every_dtype_and_shape_crosses_and_its_gradient_comes_back(workers, dtype, shape):
    assert_the_same(*both(workers, squared, values(dtype, *shape)))


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_crosses_under_second_order(workers, dtype):
    def slopes(run):
        x = values(dtype, 3).requires_grad_()
        (slope,) = torch.autograd.grad(total(run(x)), [x], create_graph=True)
        (curve,) = torch.autograd.grad(total(slope), [x])
        return slope.detach(), curve

    def remote():
        with gw.context():
            return slopes(lambda x: gw.rpc_sync("w1", squared, args=(x,)))

    for got, want in zip(workers[0].run(remote), slopes(squared), strict=True):
        assert got.dtype == want.dtype
        assert torch.equal(got, want)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_a_complex_tensor_may_come_back_as_a_real_one(workers, dtype):
    assert_the_same(*both(workers, as_real, values(dtype, 3)))


def test_a_lazily_conjugated_tensor_crosses(workers):
    def slope(run):
        x = values(torch.complex64, 3).requires_grad_()
        total(run(x.conj())).backward()
        return x.grad

    def remote():
        with gw.context():
            return slope(lambda x: gw.rpc_sync("w1", squared, args=(x,)))

    assert torch.equal(workers[0].run(remote).resolve_conj(), slope(squared).resolve_conj())


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.uint8, torch.int32])
def test_integers_and_bools_cross_beside_those_that_have_gradients(workers, dtype):
    def program():
        x = torch.tensor([1.0, 2.0], requires_grad=True)
        picked = torch.tensor([1, 0], dtype=dtype)
        with gw.context():
            product = gw.rpc_sync("w1", torch.mul, args=(x, picked))
            product.sum().backward()
        return x.grad

    assert workers[0].run(program).tolist() == [1, 0]


def test_several_dtypes_cross_in_one_call(workers):
    def program():
        leaves = [values(dtype, 2).requires_grad_() for dtype in DTYPES]
        with gw.context():
            squares = gw.rpc_sync("w1", one_of_each, args=(leaves,))
            sum(total(square).double() for square in squares).backward()
        return leaves

    for leaf in workers[0].run(program):
        want = values(leaf.dtype, 2).requires_grad_()
        total(squared(want)).backward()
        assert leaf.grad.dtype == leaf.dtype
        assert torch.equal(leaf.grad, want.grad)


# -- strides


LAYOUTS = {
    "transposed": lambda x: x.t(),
    "every second": lambda x: x[::2],
    "a column": lambda x: x[:, 1],
    "a view of the middle": lambda x: x[1:3, 1:],
    "expanded": lambda x: x[:1].expand(5, x.shape[1]),
    "expanded from a scalar": lambda x: x.sum().expand(4),
    "flipped": lambda x: x.flip(0),
    "0-dim": lambda x: x[0, 0],
    "empty": lambda x: x[:0],
    "channels last": lambda x: x.expand(2, 2, *x.shape).contiguous(
        memory_format=torch.channels_last
    ),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_views_of_every_kind_cross_and_their_gradients_come_back(workers, layout):
    view = LAYOUTS[layout]

    def slope(run):
        x = values(torch.float64, 4, 3).requires_grad_()
        result = run(view(x) * 1 if layout == "channels last" else view(x))
        (result * result).sum().backward()
        return result.detach(), x.grad

    def remote():
        with gw.context():
            return slope(lambda x: gw.rpc_sync("w1", squared, args=(x,)))

    assert_the_same(workers[0].run(remote), slope(squared))


@pytest.mark.parametrize(
    "view", [lambda x: x.t(), lambda x: x[:, ::2], lambda x: x[:1].expand(4, 3)]
)
def test_leaves_that_are_not_contiguous_get_their_gradients(workers, view):
    def slope(run):
        leaf = view(values(torch.float64, 4, 3)).detach().requires_grad_()
        run(leaf).sum().backward()
        return leaf.grad

    def remote():
        with gw.context():
            return slope(lambda x: gw.rpc_sync("w1", squared, args=(x,)))

    assert torch.equal(workers[0].run(remote), slope(squared))


def test_an_expanded_gradient_comes_back(workers):
    """The gradient of sum() is one number, expanded."""

    def program():
        x = torch.ones(3, 2, requires_grad=True)
        with gw.context():
            gw.rpc_sync("w1", doubled, args=(x,)).sum().backward()
        return x.grad

    assert workers[0].run(program).tolist() == [[2, 2]] * 3


# -- sparse


@pytest.mark.parametrize("coalesced", [False, True])
def test_a_sparse_coo_tensor_crosses_and_its_gradient_comes_back(workers, coalesced):
    def slope(run):
        x = torch.tensor([0.0, 2.0, 3.0], dtype=torch.float64, requires_grad=True)
        sparse = x.to_sparse()
        sparse = sparse.coalesce() if coalesced else sparse + sparse
        result = run(sparse)
        result.sum().backward()
        return result.detach(), x.grad

    def remote():
        with gw.context():
            return slope(lambda x: gw.rpc_sync("w1", dense_squared, args=(x,)))

    assert_the_same(workers[0].run(remote), slope(dense_squared))


def test_a_sparse_coo_result_comes_back_with_its_graph(workers):
    def slope(run):
        x = torch.tensor([0.0, 2.0, 3.0], dtype=torch.float64, requires_grad=True)
        result = run(x)
        result.to_dense().square().sum().backward()
        return result.detach(), x.grad

    def remote():
        with gw.context():
            return slope(lambda x: gw.rpc_sync("w1", to_sparse_squared, args=(x,)))

    assert_the_same(workers[0].run(remote), slope(to_sparse_squared))


def test_a_sparse_leaf_gets_a_gradient_like_the_one_it_would_get_here(workers):
    def slope(run):
        x = torch.tensor([0.0, 2.0, 3.0], dtype=torch.float64).to_sparse().requires_grad_()
        run(x).sum().backward()
        return (x.grad,)

    def remote():
        with gw.context():
            return slope(lambda x: gw.rpc_sync("w1", dense_squared, args=(x,)))

    assert_the_same(workers[0].run(remote), slope(dense_squared))


def test_sparse_gradients_of_an_embedding_stay_sparse(workers):
    def program():
        weight = torch.ones(5, 2, requires_grad=True)
        rows = torch.tensor([1, 3, 1])
        with gw.context():
            looked_up = torch.nn.functional.embedding(rows, weight, sparse=True)
            gw.rpc_sync("w1", doubled, args=(looked_up,)).sum().backward()
        return weight.grad

    gradient = workers[0].run(program)
    assert gradient.is_sparse
    assert gradient.to_dense()[:, 0].tolist() == [0, 4, 0, 2, 0]


@pytest.mark.filterwarnings(IN_BETA)
def test_a_sparse_csr_tensor_crosses_and_its_gradient_comes_back(workers):
    def slope(run):
        x = torch.tensor([[0.0, 2.0], [3.0, 0.0]], dtype=torch.float64, requires_grad=True)
        result = run(x.to_sparse_csr())
        result.sum().backward()
        return result.detach(), x.grad

    def remote():
        with gw.context():
            return slope(lambda x: gw.rpc_sync("w1", dense_squared, args=(x,)))

    assert_the_same(workers[0].run(remote), slope(dense_squared))


@pytest.mark.filterwarnings(IN_BETA)
def test_a_sparse_csr_result_comes_back_with_its_graph(workers):
    def slope(run):
        x = torch.tensor([[0.0, 2.0], [3.0, 0.0]], dtype=torch.float64, requires_grad=True)
        result = run(x)
        result.to_dense().square().sum().backward()
        return result.detach(), x.grad

    def remote():
        with gw.context():
            return slope(lambda x: gw.rpc_sync("w1", to_csr, args=(x,)))

    assert_the_same(workers[0].run(remote), slope(to_csr))


# -- meta


def test_a_meta_tensor_crosses_as_what_it_is(workers):
    x = torch.empty(2, 3, device="meta", dtype=torch.float16).t()

    assert workers[0].run(gw.rpc_sync, "w1", described, args=(x,)) == (
        "torch.float16",
        (3, 2),
        x.stride(),
        False,
    )


@pytest.mark.slow  # torch imports what it runs meta tensors with
def test_a_graph_of_meta_tensors_is_differentiated(workers):
    def program():
        x = torch.empty(2, 3, device="meta", requires_grad=True)
        with gw.context():
            gw.rpc_sync("w1", squared, args=(x,)).sum().backward()
        return x.grad

    gradient = workers[0].run(program)
    assert gradient.is_meta
    assert gradient.shape == (2, 3)


# -- sharing


def test_the_same_tensor_twice_gets_the_sum_of_both_gradients(workers):
    def program():
        x = torch.tensor([2.0, 3.0], requires_grad=True)
        with gw.context():
            gw.rpc_sync("w1", torch.mul, args=(x, x)).sum().backward()
        return x.grad

    assert workers[0].run(program).tolist() == [4, 6]


def test_the_same_tensor_twice_in_a_result_gets_the_sum_of_both_gradients(workers):
    def program():
        x = torch.tensor([2.0, 3.0], requires_grad=True)
        with gw.context():
            a, b = gw.rpc_sync("w1", summed_and_itself, args=(x,))
            (a + (b * 10).sum()).backward()
        return x.grad

    assert workers[0].run(program).tolist() == [11, 11]


def test_views_of_one_storage_keep_their_gradients_apart(workers):
    def slope(run):
        x = values(torch.float64, 6).requires_grad_()
        base = x * 1
        parts = run([base[:4], base[2:], base])
        sum((part * (n + 1)).sum() for n, part in enumerate(parts)).backward()
        return x.grad

    def remote():
        with gw.context():
            return slope(lambda parts: gw.rpc_sync("w1", one_of_each, args=(parts,)))

    assert torch.equal(workers[0].run(remote), slope(one_of_each))
