from __future__ import annotations

import copy
import warnings
import weakref

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from gradwire.errors import BadMessage, NotSerializable
from gradwire.options import Limits
from gradwire.wire.message import ALIGNMENT
from gradwire.wire.tensor import (
    DTYPE_CODES,
    DTYPES,
    INFERENCE,
    LAYOUT_CODES,
    REQUIRES_GRAD,
    TensorHeader,
    decode_tensors,
    encode_tensors,
    order_of,
    strides_of,
)

FLOAT32 = DTYPE_CODES[torch.float32]
INT64 = DTYPE_CODES[torch.int64]
IN_BETA = "ignore:.*(Sparse CSR|ComplexHalf).*:UserWarning"


def joined(buffers):
    """What a transport makes of the buffers: one writable block."""
    return memoryview(bytearray(b"".join(buffers))) if buffers else None


def crossed(*tensors):
    headers, buffers = encode_tensors(tensors)
    wire = msgspec.msgpack.encode(headers)
    return decode_tensors(msgspec.msgpack.decode(wire, type=list[TensorHeader]), joined(buffers))


def raw(tensor):
    """The elements as bytes, so that NaN equals NaN."""
    flat = tensor.contiguous().reshape(-1)
    return flat.view(torch.uint8).tolist() if flat.numel() else []


def assert_arrived(sent, got):
    assert (got.dtype, got.shape, got.device) == (sent.dtype, sent.shape, sent.device)
    assert got.stride() == sent.detach().clone().stride()
    assert raw(got) == raw(sent.detach().resolve_conj().resolve_neg())
    assert not got.requires_grad
    assert not got._is_view()
    assert got._base is None


def compressed(layout, *, batch=()):
    eye = torch.arange(16.0).reshape(4, 4).expand(*batch, 4, 4)
    blocked = layout in (torch.sparse_bsr, torch.sparse_bsc)
    return eye.to_sparse(layout=layout, blocksize=(2, 2) if blocked else None)


@pytest.mark.filterwarnings(IN_BETA)
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
@pytest.mark.parametrize("shape", [(), (5,), (0,), (0, 3), (3, 0, 2), (2, 3, 4)], ids=str)
def test_every_dtype_and_shape_arrives_as_it_left(dtype, shape):
    numel = torch.Size(shape).numel()
    noise = torch.arange(numel * dtype.itemsize, dtype=torch.uint8)
    if dtype is torch.bool:
        noise %= 2
    tensor = noise.view(dtype).reshape(shape) if numel else torch.empty(shape, dtype=dtype)

    (got,) = crossed(tensor)

    assert_arrived(tensor, got)


def test_the_buffer_of_a_contiguous_tensor_is_its_own_memory():
    tensor = torch.zeros(4)

    _, (buffer,) = encode_tensors([tensor])
    tensor[0] = 1.0

    assert (buffer.format, buffer.ndim, buffer.nbytes) == ("B", 1, 16)
    assert bytes(buffer[:4]) == b"\0\0\x80\x3f"


def test_a_buffer_keeps_its_tensor_alive():
    tensor = torch.ones(4)
    _, (buffer,) = encode_tensors([tensor])
    del tensor

    assert bytes(buffer) == b"\0\0\x80\x3f" * 4


def test_every_tensor_starts_at_a_multiple_of_the_alignment():
    headers, buffers = encode_tensors(
        [torch.ones(3), torch.ones(()), torch.ones(0), torch.ones(16)]
    )

    assert [header.offset for header in headers] == [0, ALIGNMENT, 0, 2 * ALIGNMENT]
    assert [len(buffer) for buffer in buffers] == [12, 52, 4, 60, 64]
    assert not any(buffers[1])


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(6.0).reshape(2, 3).t(),
        torch.arange(24.0).reshape(2, 3, 4).permute(2, 0, 1),
        torch.arange(120.0).reshape(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.arange(40.0).reshape(2, 1, 4, 5).to(memory_format=torch.channels_last),
        torch.arange(3.0).reshape(1, 3, 1, 1).to(memory_format=torch.channels_last),
        torch.arange(40.0).reshape(1, 2, 4, 5, 1).to(memory_format=torch.channels_last_3d),
        torch.arange(5.0)[None, :, None],
        torch.arange(5.0)[:, None].t(),
        torch.arange(6, dtype=torch.bfloat16).reshape(2, 3).t(),
    ],
    ids=lambda tensor: f"{tuple(tensor.shape)}/{tensor.stride()}",
)
def test_permuted_memory_is_sent_as_it_lies(tensor):
    _, (buffer,) = encode_tensors([tensor])

    (got,) = crossed(tensor)

    assert torch.frombuffer(buffer, dtype=torch.uint8).data_ptr() == tensor.data_ptr()
    assert_arrived(tensor, got)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(3.0).expand(4, 3),
        torch.arange(10.0)[::2],
        torch.arange(24.0).reshape(4, 6)[:, 1:3],
        torch.arange(24.0).reshape(4, 6)[:, 1:3].t(),
        torch.arange(10.0).as_strided((4, 4), (2, 1)),
        torch.arange(48.0).reshape(2, 3, 2, 4).to(memory_format=torch.channels_last)[:, :2],
    ],
    ids=["expanded", "gaps", "columns", "columns transposed", "overlapping", "channels last"],
)
def test_memory_with_gaps_or_overlaps_is_compacted_as_clone_would(tensor):
    _, buffers = encode_tensors([tensor])

    (got,) = crossed(tensor)

    assert sum(map(len, buffers)) == tensor.numel() * tensor.itemsize
    assert_arrived(tensor, got)


def test_a_stride_that_no_memory_order_gives_to_a_dimension_of_size_one_becomes_a_natural_one():
    (got,) = crossed(torch.zeros(200).as_strided((4, 1), (1, 100)))

    assert got.stride() == (1, 4)


@pytest.mark.filterwarnings(IN_BETA)
def test_conjugate_negative_and_zero_tensors_travel_as_their_values():
    complex_ = torch.tensor([[1 + 2j, 3 - 4j]])
    half = torch.arange(8, dtype=torch.float16).view(torch.complex32)
    sent = [complex_.conj(), complex_.conj().t(), complex_.conj().imag]

    for tensor, got in zip(sent, crossed(*sent), strict=True):
        assert_arrived(tensor, got)
        assert not got.is_conj()
        assert not got.is_neg()
    assert crossed(half)[0].view(torch.float16).tolist() == list(range(8))
    assert crossed(torch._efficientzerotensor((3,)))[0].tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("kind", [nn.Parameter, nn.Buffer])
def test_parameters_and_buffers_arrive_as_plain_tensors(kind):
    (got,) = crossed(kind(torch.ones(2, 3)))

    assert type(got) is torch.Tensor
    assert got.tolist() == [[1.0] * 3] * 2


@pytest.mark.parametrize("shape", [(3,), (2, 1), (0,)])
def test_requires_grad_is_told_by_the_header_alone(shape):
    leaf = torch.ones(shape, requires_grad=True)
    headers, buffers = encode_tensors([leaf, leaf * 2, leaf.detach()])

    assert [bool(header.flags & REQUIRES_GRAD) for header in headers] == [True, True, False]
    assert not any(got.requires_grad for got in decode_tensors(headers, joined(buffers)))


@pytest.mark.parametrize("reader_in_inference_mode", [False, True])
def test_inference_tensors_are_inference_tensors_again_whatever_the_mode_of_the_reader(
    reader_in_inference_mode,
):
    with torch.inference_mode():
        sent = [torch.ones(2), torch.ones(2, 3).t(), torch.ones(0), torch.eye(2).to_sparse()]
    headers, buffers = encode_tensors([*sent, torch.ones(2)])

    with torch.inference_mode(reader_in_inference_mode):
        got = decode_tensors(headers, joined(buffers))

    assert [bool(header.flags & INFERENCE) for header in headers] == [True] * 4 + [False]
    assert [tensor.is_inference() for tensor in got] == [True] * 4 + [False]


def test_meta_tensors_are_a_header_only():
    sent = torch.empty(2, 3, device="meta").t()
    headers, buffers = encode_tensors([sent])

    (got,) = decode_tensors(headers, None)

    assert buffers == []
    assert (got.device.type, got.shape, got.stride()) == ("meta", sent.shape, sent.stride())


@pytest.mark.parametrize("default", ["cpu", "meta"])
def test_the_default_device_of_the_reader_does_not_matter(default):
    headers, buffers = encode_tensors(
        [torch.ones(2), torch.ones(0), torch.ones(2, 2), torch.eye(2).to_sparse()]
    )

    with torch.device(default):
        got = decode_tensors(headers, joined(buffers))

    assert {tensor.device.type for tensor in got} == {"cpu"}


def test_coo_tensors_arrive_coalesced_or_not_as_they_were():
    indices, values = torch.tensor([[0, 2, 0]]), torch.tensor([[1.0], [2.0], [3.0]])
    loose = torch.sparse_coo_tensor(indices, values, (4, 1), check_invariants=True)
    empty = torch.sparse_coo_tensor(size=(3, 0), check_invariants=True)

    for sent in (loose, loose.coalesce(), empty, loose.to(torch.bfloat16)):
        (got,) = crossed(sent)
        assert got.layout is torch.sparse_coo
        assert got.is_coalesced() == sent.is_coalesced()
        assert got._indices().tolist() == sent._indices().tolist()
        assert got._values().tolist() == sent._values().tolist()
        assert (got.shape, got.dtype) == (sent.shape, sent.dtype)


def test_sparse_tensors_that_require_grad_say_so_in_their_own_header_only():
    (header,), _ = encode_tensors([torch.eye(2).to_sparse().requires_grad_()])

    assert header.flags & REQUIRES_GRAD
    assert [part.flags for part in header.parts] == [0, 0]


@pytest.mark.filterwarnings(IN_BETA)
@pytest.mark.parametrize("batch", [(), (2,)], ids=["single", "batch"])
@pytest.mark.parametrize("layout", list(LAYOUT_CODES)[2:], ids=str)
def test_compressed_sparse_tensors_arrive_as_they_left(layout, batch):
    sent = compressed(layout, batch=batch)

    (got,) = crossed(sent)

    assert got.layout is layout
    assert got.values().tolist() == sent.values().tolist()
    assert got.to_dense().tolist() == sent.to_dense().tolist()


def test_a_warning_turned_error_costs_no_message(monkeypatch):
    (header,), buffers = encode_tensors([torch.eye(2).to_sparse()])
    warnings = [UserWarning("in beta")]
    construct = torch.sparse_coo_tensor

    def warn_once(*args, **kwargs):
        if warnings:
            raise warnings.pop()
        return construct(*args, **kwargs)

    monkeypatch.setattr(torch, "sparse_coo_tensor", warn_once)

    assert decode_tensors([header], joined(buffers))[0].to_dense().tolist() == [[1, 0], [0, 1]]


def test_received_tensors_keep_the_very_payload_object_alive_until_the_last_one_dies():
    headers, buffers = encode_tensors([torch.ones(2), torch.ones(2, 2), torch.eye(3).to_sparse()])
    payload = joined(buffers)
    alive = weakref.ref(payload)

    tensors = decode_tensors(headers, payload)
    del payload
    while tensors:
        assert alive() is not None
        tensors.pop()

    assert alive() is None


def test_received_tensors_share_neither_versions_nor_storage():
    a, b = crossed(torch.ones(16), torch.ones(4, 4))
    version = b._version

    a.mul_(2)

    assert b._version == version
    assert b.tolist() == [[1.0] * 4] * 4
    assert a.untyped_storage().nbytes() == b.untyped_storage().nbytes() == 64
    assert copy.deepcopy(a).untyped_storage().nbytes() == 64


@pytest.mark.parametrize("sent", [torch.ones(3), torch.ones(2, 3), torch.ones(2, 3).t()])
def test_a_function_may_mark_a_received_tensor_dirty_and_the_next_operator_may_write_to_it(sent):
    class Wake(torch.autograd.Function):
        @staticmethod
        def forward(ctx, wake, *tensors):
            ctx.mark_dirty(*tensors)
            return tensors

        @staticmethod
        def backward(ctx, *grads):
            return None, *grads

    a, b = Wake.apply(torch.empty(0, requires_grad=True), *crossed(sent, sent))
    a.mul_(3)
    b.add_(1)

    assert a.grad_fn is not None
    assert (a.detach() == 3).all()
    assert (b.detach() == 2).all()


class Labelled(torch.Tensor):
    pass


def quantized():
    with warnings.catch_warnings():  # torch says so once
        warnings.simplefilter("ignore")
        return torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)


def nested():
    with pytest.warns(UserWarning, match="nested"):
        return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])


def sparse_meta():
    indices = torch.zeros((1, 0), dtype=torch.int64, device="meta")
    values = torch.zeros(0, device="meta")
    return torch.sparse_coo_tensor(indices, values, (3,), check_invariants=False)


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(
    ("make", "what", "hint"),
    [
        (
            lambda: torch.ones(2).as_subclass(Labelled),
            r"type [\w.]*\.Labelled cannot",
            "plain torch.Tensor",
        ),
        (
            lambda: nn.UninitializedParameter(),
            r"type [\w.]*UninitializedParameter cannot",
            "plain torch.Tensor",
        ),
        pytest.param(
            lambda: torch.nested.nested_tensor([torch.ones(2)], layout=torch.jagged),
            r"type [\w.]*NestedTensor cannot",
            "plain torch.Tensor",
            marks=pytest.mark.slow,  # torch imports its compiler for it
        ),
        (nested, "nested tensor cannot", "to_padded_tensor"),
        (quantized, "dtype torch.qint8 cannot", "dequantize"),
        (lambda: torch.ones(2, 2).to_mkldnn(), "layout torch._mkldnn cannot", "to_dense"),
        (sparse_meta, "layout torch.sparse_coo on meta cannot", "to_dense"),
    ],
    ids=["subclass", "uninitialized", "jagged", "nested", "quantized", "mkldnn", "sparse meta"],
)
def test_what_has_no_plain_bytes_is_refused_with_the_way_out(make, what, hint):
    with pytest.raises(
        NotSerializable, match=rf"tensors\[1\]: a (tensor of )?{what} be serialized\nhint: .*{hint}"
    ):
        encode_tensors([torch.ones(1), make()])


def test_a_tensor_of_a_transform_is_refused():
    with pytest.raises(
        NotSerializable, match=r"a tensor without its own memory cannot be serialized\nhint"
    ):
        torch.vmap(lambda row: encode_tensors([row]) and row)(torch.ones(2, 3))


def test_too_many_tensors_are_refused_on_both_ends():
    with pytest.raises(NotSerializable, match=r"65537 tensors .* limit of 65536\nhint: stack them"):
        encode_tensors([torch.ones(0)] * (Limits().tensors + 1))
    with pytest.raises(BadMessage, match="65537 tensors are over the limit of 65536"):
        decode_tensors([TensorHeader(FLOAT32, (0,))] * (Limits().tensors + 1), None)


def test_a_read_only_block_is_our_own_bug():
    with pytest.raises(AssertionError, match="so must their block"):
        decode_tensors([TensorHeader(FLOAT32, (1,))], memoryview(b"1234"))


COO, CSR = LAYOUT_CODES[torch.sparse_coo], LAYOUT_CODES[torch.sparse_csr]
INDICES, VALUES = TensorHeader(INT64, (1, 2)), TensorHeader(FLOAT32, (2,), 64)


@pytest.mark.parametrize(
    ("header", "why"),
    [
        (TensorHeader(200, (1,)), "dtype 200 is unknown to torch"),
        (TensorHeader(-1, (1,)), "dtype -1 is unknown"),
        (TensorHeader(FLOAT32, (-1,)), r"shape \(-1,\) has a negative dimension"),
        (TensorHeader(FLOAT32, (1,) * 65), "65 dimensions are over the limit of 64"),
        (TensorHeader(FLOAT32, (1 << 32, 1 << 31)), "does not fit in memory"),
        (TensorHeader(FLOAT32, (0, 1 << 62, 4)), "does not fit in memory"),
        (TensorHeader(FLOAT32, (33,)), "bytes 0 to 132 are outside a payload of 128"),
        (TensorHeader(FLOAT32, (1,), 128), "bytes 128 to 132 are outside"),
        (TensorHeader(FLOAT32, (1,), 4), "offset 4 is not aligned"),
        (TensorHeader(FLOAT32, (1,), -64), "offset -64 is not aligned, or overlaps"),
        (TensorHeader(FLOAT32, (2, 2), order=(0, 0)), r"order \(0, 0\) is no permutation of 2"),
        (TensorHeader(FLOAT32, (2, 2), order=(0,)), "is no permutation"),
        (TensorHeader(FLOAT32, (2,), flags=8), "flags 0x8 are unknown"),
        (TensorHeader(FLOAT32, (2,), flags=4), "a dense tensor has sparse parts"),
        (TensorHeader(FLOAT32, (2,), parts=(INDICES,)), "a dense tensor has sparse parts"),
        (TensorHeader(FLOAT32, (2,), layout=77), "layout 77 is unknown"),
        (TensorHeader(FLOAT32, (2,), layout=COO), "0 parts do not make a tensor of layout"),
        (
            TensorHeader(FLOAT32, (2,), layout=COO, parts=(INDICES, TensorHeader(FLOAT32, (2,)))),
            "overlaps the tensor before",
        ),
        (
            TensorHeader(INT64, (2,), layout=COO, parts=(INDICES, VALUES)),
            "do not make a torch.sparse_coo tensor of torch.int64",
        ),
        (
            TensorHeader(FLOAT32, (2,), layout=COO, parts=(INDICES, TensorHeader(0, (), layout=1))),
            "is not a plain dense tensor",
        ),
        (
            TensorHeader(FLOAT32, (2,), flags=4, layout=COO, parts=(INDICES, VALUES)),
            "not a valid torch.sparse_coo tensor",
        ),
        (
            TensorHeader(FLOAT32, (2, 2), layout=COO, parts=(INDICES, VALUES)),
            "not a valid torch.sparse_coo tensor",
        ),
        (
            TensorHeader(FLOAT32, (1, 2), layout=CSR, parts=(INDICES, INDICES, VALUES)),
            "overlaps the tensor before",
        ),
    ],
)
def test_a_wrong_header_is_a_bad_message(header, why):
    with pytest.raises(BadMessage, match=f"a tensor header is wrong: .*{why}"):
        decode_tensors([header], memoryview(bytearray(128)))


def test_sparse_indices_that_point_outside_are_a_bad_message():
    headers, buffers = encode_tensors([torch.ones(3).to_sparse()])
    payload = joined(buffers)
    payload[0] = 200

    with pytest.raises(BadMessage, match=r"not a valid torch\.sparse_coo tensor: "):
        decode_tensors(headers, payload)


def test_two_tensors_on_the_same_bytes_are_a_bad_message():
    header = TensorHeader(FLOAT32, (2,))

    with pytest.raises(BadMessage, match="offset 0 is not aligned, or overlaps the tensor before"):
        decode_tensors([header, header], memoryview(bytearray(64)))


@pytest.mark.parametrize("device", ["cuda:99", "cuda", "nonsense", "cpu", "privateuseone:0", "\0"])
def test_a_device_is_not_chosen_here(device):
    header = TensorHeader(FLOAT32, (2,), device=device)

    with pytest.raises(BadMessage, match=r"it arrives on .*, where it cannot"):
        decode_tensors([header], memoryview(bytearray(64)))


def test_a_block_is_not_found_here():
    header = TensorHeader(FLOAT32, (2,), block=(1, 0))

    with pytest.raises(BadMessage, match="it arrives on a device, where it cannot"):
        decode_tensors([header], memoryview(bytearray(64)))


small = st.integers(-2, 5)
numbers = small | st.sampled_from([64, 128, 1 << 31, 1 << 62, (1 << 64) - 1, -(1 << 63)])
shapes = st.lists(small | numbers, max_size=4).map(tuple)
flags = st.integers(-1, 9)
orders = st.none() | st.permutations(range(3)).map(tuple) | st.lists(small, max_size=4).map(tuple)
devices = st.sampled_from(["", "", "", "meta", "cuda:0", "x"])
dense_headers = st.builds(
    TensorHeader,
    st.integers(-1, len(DTYPES)),
    shapes,
    numbers,
    flags,
    orders,
    st.just(0),
    devices,
)
sparse_headers = st.builds(
    TensorHeader,
    st.sampled_from([FLOAT32, INT64]),
    shapes,
    numbers,
    flags,
    st.none() | orders,
    st.integers(-1, 7),
    devices,
    st.lists(
        st.builds(
            TensorHeader,
            st.sampled_from([FLOAT32, INT64]),
            shapes,
            st.sampled_from([0, 64, 128]),
            flags=st.sampled_from([0, 0, 0, INFERENCE]),
        )
        | dense_headers,
        max_size=3,
    ).map(tuple),
)


@pytest.mark.slow
@pytest.mark.filterwarnings(IN_BETA)
@settings(derandomize=True, deadline=None, max_examples=50)
@given(st.lists(dense_headers | sparse_headers, max_size=3))
def test_random_headers_give_tensors_inside_the_payload_or_a_bad_message(headers):
    payload = memoryview(bytearray(range(256)))
    try:
        tensors = decode_tensors(headers, payload)
    except BadMessage:
        return
    assert [tuple(tensor.shape) for tensor in tensors] == [header.shape for header in headers]
    for tensor in tensors:
        if tensor.layout is torch.strided and tensor.device.type == "cpu":
            tensor.clone()


@settings(derandomize=True, deadline=None, max_examples=50)
@given(st.lists(st.integers(1, 3), max_size=5).map(tuple), st.data())
def test_an_order_and_its_strides_tell_the_same(shape, data):
    order = tuple(data.draw(st.permutations(range(len(shape)))))
    strides = tuple(strides_of(shape, order))

    assert strides_of(shape, order_of(shape, strides)) == list(strides)
