"""PickleCodec: encodes any value as a pickle, with its tensors and references separately.

A peer that may send a pickle may run any code here. A worker uses this codec only if its options or
its behavior say so, as for programs written for torch.distributed.rpc. No other module imports
pickle: messages between a process and its own children are pickled here as well.

Note [Parameters]: a tensor is sent beside the pickle and stays part of the graph. So does an
nn.Parameter among the arguments, in their containers (subclasses too: a call is a NamedTuple) or in
the fields of a dataclass, and arrives as a plain tensor of the graph. Where no edge was recorded
there is no graph to lose, and programs written for torch get an nn.Parameter, as from torch. Inside
any other object, such as a module, it is copied and arrives as a leaf: the code that receives a
module may register, freeze and optimize its parameters, which a tensor with a grad_fn does not
allow. No gradient comes back to the original, so the caller is warned (rpc/graph_cut.py).

TorchScript is pickled as torch.distributed.rpc does it: a function by its name, whose module is
imported on the other worker if no TorchScript of that name is compiled there; a module as the
archive that torch saves, with copies of its parameters.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import io
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from operator import attrgetter
from types import FunctionType, ModuleType
from typing import Any, NamedTuple, cast, final

import torch
from torch import Tensor, nn
from torch._C import ScriptFunction
from torch.jit import ScriptModule

from gradwire.errors import BadMessage, GradwireError, NotSerializable
from gradwire.rpc.codec.walk import LEAVES, Conversion, Encoded, Place
from gradwire.rpc.expose.async_execution import LATER, async_execution
from gradwire.rpc.expose.names import is_of_main, one_main

Reducers = Mapping[type, Conversion]
_ROOT = "__torch__."
_TENSOR = -1
_PARAMETER = -2
_SEQUENCES = (list, tuple, set, frozenset)


@final
class PickleCodec:
    """Encodes and decodes any value, as `Codec` does.

    With `restores_parameters`, a parameter that arrives without a graph is an nn.Parameter again.
    """

    def __init__(
        self, reducers: Reducers | None = None, *, restores_parameters: bool = False
    ) -> None:
        self._reducers: Reducers = {} if reducers is None else reducers
        self._restores = restores_parameters
        self._encoders: dict[type, tuple[int, Conversion]] = {}
        self._decoders: dict[int, Conversion] = {}

    def extend(self, kind: type, tag: int, encode: Conversion, decode: Conversion) -> None:
        """Encode values of exactly this type as what `encode` returns."""
        self._encoders[kind] = tag, encode
        self._decoders[tag] = decode

    def encode(self, value: object, place: Place = "args") -> Encoded:
        """The value as a pickle and its tensors; raises NotSerializable."""
        data = io.BytesIO()
        pickler = _Pickler(data, self, value)
        try:
            pickler.dump(value)
        except GradwireError:
            raise
        except Exception as error:
            name = place if isinstance(place, str) else "the arguments"
            raise NotSerializable(f"{name}: {type(error).__name__}: {error}") from error
        return Encoded(data.getvalue(), pickler.tensors, pickler.copies)

    def decode(self, data: bytes | memoryview, tensors: Sequence[Tensor]) -> object:
        """The value that was encoded."""
        try:
            return _Unpickler(io.BytesIO(data), self, tensors).load()
        except GradwireError:
            raise
        except (AttributeError, ImportError) as error:
            raise BadMessage(
                f"{error}. Default RPC pickler does not serialize function code. "
                "Ensure that UDFs are defined on both caller and callee modules."
            ) from error
        except Exception as error:
            raise BadMessage(f"a pickle does not load: {type(error).__name__}: {error}") from error


def sent_exception(name: str) -> type[BaseException] | None:
    """The exception of that name; imports its module, as whoever sends pickles may do so."""
    home, _, qualname = name.partition(":")
    try:
        found: object = attrgetter(qualname)(importlib.import_module(home))
    except (ImportError, AttributeError, ValueError):
        return None
    return found if isinstance(found, type) and issubclass(found, BaseException) else None


def dumps(value: object) -> bytes:
    """Pickle a value for a process that this one starts; modules are pickled by name."""
    file = io.BytesIO()
    _PlainPickler(file, pickle.HIGHEST_PROTOCOL).dump(value)
    return file.getvalue()


def loads(data: bytes) -> Any:  # noqa: ANN401
    """The value that `dumps` pickled. Not for a peer's bytes: see launch/child.py."""
    return pickle.loads(data)


class WithCode(NamedTuple):
    """A value with its code."""

    data: bytes
    copies: int
    """how many tensors that require grad are copied, and so cut off from their graph"""


def dumps_with_code(value: object) -> WithCode:
    """Pickle a value for a process that this one starts, with the code that `__main__` defines.

    After it follow the functions and classes of `__main__` that it uses, by their names.
    """
    of_main: dict[str, object] = {}
    copies = 0

    def note(one: object) -> None:
        nonlocal copies
        if isinstance(one, Tensor):
            copies += one.requires_grad
        elif isinstance(one, FunctionType | type) and is_of_main(one):
            of_main[one.__qualname__] = one

    file = io.BytesIO()
    pickler = _code_pickler(file, note)
    pickler.dump(value)
    pickler.dump(of_main)  # they are the same objects: it has a memo
    return WithCode(file.getvalue(), copies)


def loads_with_code(data: bytes) -> tuple[Any, dict[str, Any]]:
    """What `dumps_with_code` pickled. See Note [Code from the parent], launch/received.py."""
    unpickler = pickle.Unpickler(io.BytesIO(data))
    return unpickler.load(), unpickler.load()


class _PlainPickler(pickle.Pickler):
    def reducer_override(self, value: object) -> Any:  # noqa: ANN401
        """Pickle a Python module by its name."""
        if isinstance(value, ModuleType):
            return importlib.import_module, (one_main(value.__name__),)
        return NotImplemented


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, codec: PickleCodec, value: object) -> None:
        super().__init__(file)
        self._encoders, self._reducers = codec._encoders, codec._reducers
        self._parameters = {id(parameter) for parameter in _parameters(value)}
        self._places: dict[int, int] = {}
        self.tensors: list[Tensor] = []
        self.copies = 0
        """how many tensors that require grad are copied, and so cut off from their graph"""

    def persistent_id(self, value: object) -> object:
        """Keep tensors and references out of the pickle; each tensor is listed once."""
        kind = type(value)
        if kind is Tensor or (kind is nn.Parameter and id(value) in self._parameters):
            assert isinstance(value, Tensor)
            if id(value) not in self._places:
                self._places[id(value)] = len(self.tensors)
                self.tensors.append(value)
            return _TENSOR if kind is Tensor else _PARAMETER, self._places[id(value)]
        tag, encode = self._encoders.get(kind, (None, None))
        return None if encode is None else (tag, encode(value))

    def reducer_override(self, value: object) -> Any:  # noqa: ANN401
        """Pickle values with a reducer by it, and nameless functions by cloudpickle, if there."""
        self._note_copy(value)
        reducer = self._reducers.get(type(value))
        if reducer is not None:
            return reducer(value)
        if hasattr(type(value), "_to_parts"):
            return type(value)._from_parts, value._to_parts()  # type: ignore[attr-defined]
        if isinstance(value, ScriptFunction):
            return function_named, (value.qualified_name,)
        if isinstance(value, ScriptModule):
            return module_from, (value.save_to_buffer(),)
        if isinstance(value, FunctionType):
            if isinstance(marked := getattr(value, LATER, None), ScriptFunction):
                return async_execution, (marked,)
            is_nameless = "<lambda>" in value.__qualname__ or "<locals>" in value.__qualname__
            if is_nameless and importlib.util.find_spec("cloudpickle") is not None:
                return pickle.loads, (_by_cloudpickle(value, self._note_copy),)
        return NotImplemented

    def _note_copy(self, value: object) -> None:
        if isinstance(value, Tensor):
            self.copies += value.requires_grad
        elif isinstance(value, ScriptModule):  # its parameters are not seen one by one
            self.copies += sum(parameter.requires_grad for parameter in value.parameters())


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, codec: PickleCodec, tensors: Sequence[Tensor]) -> None:
        super().__init__(file)
        self._decoders, self._tensors, self._restores = codec._decoders, tensors, codec._restores
        self._restored: dict[int, nn.Parameter] = {}

    def persistent_load(self, pid: Any) -> object:  # noqa: ANN401
        """Find the tensor or reference that came beside the pickle."""
        tag, data = pid
        if tag not in (_TENSOR, _PARAMETER):
            return self._decoders[tag](data)
        tensor = self._tensors[data]
        if tag == _TENSOR or tensor.grad_fn is not None or not self._restores:
            return tensor
        if data not in self._restored:  # one object, however often it is named
            self._restored[data] = nn.Parameter(tensor, tensor.requires_grad)
        return self._restored[data]


def _parameters(value: object, seen: set[int] | None = None) -> Iterator[nn.Parameter]:
    """The parameters among the arguments. See Note [Parameters]."""
    seen = set() if seen is None else seen
    if isinstance(value, nn.Parameter):
        yield value
        return
    inside = _inside(value)
    if inside is None or id(value) in seen:
        return
    seen.add(id(value))
    for one in inside:
        if type(one) not in LEAVES:
            yield from _parameters(one, seen)


def _inside(value: object) -> Iterable[object] | None:
    if isinstance(value, dict):
        return dict.values(value)
    if isinstance(value, _SEQUENCES):
        return value
    if isinstance(value, type | nn.Module) or not dataclasses.is_dataclass(value):
        return None
    names = (field.name for field in dataclasses.fields(value))
    return [getattr(value, name) for name in names if hasattr(value, name)]


def _by_cloudpickle(function: FunctionType, note: Callable[[object], None]) -> bytes:
    """Pickle a function with what it captures; tensors in it are copied."""
    file = io.BytesIO()
    _code_pickler(file, note).dump(function)
    return file.getvalue()


def _code_pickler(file: io.BytesIO, note: Callable[[object], None]) -> pickle.Pickler:
    """One that pickles code too; it notes every object."""
    import cloudpickle

    class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
        def persistent_id(self, value: object) -> None:
            note(value)

    return cast(pickle.Pickler, Pickler(file))


def function_named(name: str) -> Any:  # noqa: ANN401
    """The TorchScript function of that name; AttributeError if this process has none."""
    unit = torch.jit._state._python_cu
    found = unit.find_function(name)
    if found is None:
        with suppress(ImportError, ValueError):
            importlib.import_module(name.removeprefix(_ROOT).rpartition(".")[0])
        found = unit.find_function(name)
    if found is None:
        raise AttributeError(f"no TorchScript function {name.removeprefix(_ROOT)} is compiled here")
    return found


def module_from(data: bytes) -> ScriptModule:
    """The module of an archive. Not by torch.jit.load, which warns that it is deprecated."""
    load: Any = torch._C.import_ir_module_from_buffer
    wrap: Any = torch.jit._recursive.wrap_cpp_module
    return cast(ScriptModule, wrap(load(torch._C.CompilationUnit(), data, None, {}, False)))
