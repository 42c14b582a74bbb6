"""@expose and Registry: which functions, classes and methods the peers of a worker may call.

Functions and classes are sent as names (`names.py`) and looked up here. Rules of this file:
  1. A peer's string is compared, never resolved: it causes no import and no attribute access, but
     for the one step from an exposed class to a static or class method of it.
  2. A name that is not found is refused, with a hint how to expose it. Nothing is exposed by
     accident: not what a module imports, not private names, not what torch and Python define beyond
     their lists.

This file must not know calls, references or messages.
"""

from __future__ import annotations

import builtins
import functools
import sys
import types
from collections.abc import Callable, Iterable, Mapping
from operator import attrgetter
from typing import Any, TypeVar, final

from torch.nn import Module

from gradwire import errors
from gradwire.errors import ArgumentTypeError, NotExposed, UsageError
from gradwire.rpc.expose import torch_allowlist
from gradwire.rpc.expose.names import (
    Function,
    described,
    exception_name,
    is_instance_method,
    label,
    maybe_at,
    name_of,
    one_main,
    plain_name,
    steps,
)

__all__ = ["DUNDERS", "Function", "Registry", "exception_name", "expose", "name_of"]

_T = TypeVar("_T", bound=Function)

_MOST_METHODS = 4096
_MARK = "__gradwire_exposed__"

# Where to find what @expose was put on; filled as modules are imported. The place rather than the
# object, so that a decorator above @expose has effect.
_DECLARED: dict[str, tuple[str, ...]] = {}

# The special methods that return data from one call. Not __iter__: an iterator is no data. Not
# __enter__ and __exit__: a `with` block spread over calls stays open when its caller dies. All
# others (__init__, __class__, __reduce__, ...) give access to Python's internals.
DUNDERS = frozenset(
    {"__call__", "__contains__", "__delitem__", "__getitem__", "__len__", "__setitem__"}
)

_METHOD_KINDS = (
    types.FunctionType,
    staticmethod,
    classmethod,
    functools.partialmethod,
    type(functools.cache(repr)),
    types.MethodDescriptorType,
    types.WrapperDescriptorType,
    types.ClassMethodDescriptorType,
)

_SEQUENCE = "__contains__ __getitem__ __len__ count index"
_SET = "__contains__ __len__ copy difference intersection isdisjoint issubset issuperset union"
# Not str.format and format_map: their fields can read attributes ("{0.__class__}").
_BUILTIN_METHODS: Mapping[type, set[str]] = {
    cls: set(methods.split())
    for cls, methods in {
        list: f"""{_SEQUENCE} __delitem__ __setitem__ append clear copy extend insert pop remove
            reverse sort""",
        tuple: _SEQUENCE,
        dict: """__contains__ __delitem__ __getitem__ __len__ __setitem__ clear copy get items keys
            pop popitem setdefault update values""",
        set: f"""{_SET} add clear difference_update discard intersection_update pop remove
            symmetric_difference symmetric_difference_update update""",
        frozenset: f"{_SET} symmetric_difference",
        str: f"""{_SEQUENCE} capitalize casefold encode endswith find isalnum isalpha isascii
            isdecimal isdigit isidentifier islower isnumeric isspace isupper join lower lstrip
            partition removeprefix removesuffix replace rfind rindex rpartition rsplit rstrip split
            splitlines startswith strip swapcase title upper""",
        int: "as_integer_ratio bit_count bit_length conjugate",
        float: "as_integer_ratio conjugate hex is_integer",
    }.items()
}

# Not SystemExit, KeyboardInterrupt, GeneratorExit: a peer must not end this process with one.
_EXCEPTIONS: Mapping[str, type[BaseException]] = {
    label(kind): kind
    for kind in (*vars(builtins).values(), *vars(errors).values())
    if isinstance(kind, type) and issubclass(kind, Exception)
}

_EXPOSE = "@gradwire.expose, or pass expose=[module] to init_rpc/run/cluster on the"
_FUNCTION_HINT = f"decorate it with {_EXPOSE} callee"
_MAIN_HINT = (
    f"{_FUNCTION_HINT}; at a prompt or in a notebook, start the workers with gradwire.start(), "
    "and what you define there is sent to them"
)
_CLASS_HINT = f"decorate the class with {_EXPOSE} owner"
_OTHERS_HINT = (
    "use it inside a function of yours that is exposed, or pass expose=[it] to "
    "init_rpc/run/cluster on the callee"
)
_WRAP_HINT = "use it inside a function or method of yours that is exposed on the owner"


def expose(target: _T) -> _T:
    """Let peers call this function, or construct this class and call its public methods.

    Returns `target`, marked. The mark is not inherited: a subclass needs its own. On a single
    method it exposes that method. A private name is exposed like any other.
    """
    if not isinstance(target, types.FunctionType | type):
        raise UsageError(
            f"@expose was put on {described(target)}",
            hint="it goes on functions and classes, below @staticmethod and @classmethod",
        )
    name = plain_name(target)
    _DECLARED[name] = steps(name)
    setattr(target, _MARK, True)
    return target


@final
class Registry:
    """The functions, classes and methods that the peers of one worker may use.

    These are: those marked with `expose`; those given to the constructor; the public ones defined
    in a module given to the constructor, or in the `__main__` script; and those on torch's lists.
    """

    def __init__(self, expose: Iterable[types.ModuleType | Function] = ()) -> None:
        self.name_of: Callable[[Function], str] = name_of
        """how functions and classes in values are named; see launch/definitions.py"""
        self._given: dict[str, Function] = {}
        self._known: dict[str, tuple[str, str, Function]] = {}
        """module, attribute and function of each name found before, valid while it is there"""
        self._methods: dict[tuple[type, str], Any] = {}
        """the methods that were allowed before; each is valid while the class still has it"""
        for item in listed(expose):
            if isinstance(item, types.ModuleType):
                self._given |= _of_module(item)
            elif callable(item):
                self._given[name_of(item)] = item
            else:
                what = f"expose takes modules, functions and classes, not {described(item)}"
                raise UsageError(what)

    def give(self, name: str, function: Function) -> None:
        """Let peers call it by this name too."""
        self._given[name] = function

    def take_back(self, name: str) -> None:
        """They may not call it by this name any more."""
        self._given.pop(name, None)

    def lookup(self, name: str) -> Function:
        """The function or class that peers may call by this name. hot: every call served"""
        known = self._known.get(name)
        if known is not None:
            home, attribute, function = known
            current: object = getattr(sys.modules.get(home), attribute, None)
            if current is function:
                return function
        found = self._maybe_find(name)
        home, _, attribute = name.partition(":")
        if found is None:
            top = home.partition(".")[0]
            if top == "__main__":
                hint = _MAIN_HINT
            else:
                hint = _OTHERS_HINT if _is_foreign(top) else _FUNCTION_HINT
            raise NotExposed(f"{_printable(name)} is not exposed on this worker", hint=hint)
        defined: Mapping[str, object] = getattr(sys.modules.get(home), "__dict__", {})
        if defined.get(attribute) is found:
            self._known[name] = home, attribute, found
        return found

    def method(self, value: object, name: str) -> Function:
        """The public method `name` of an object held by a reference, bound to it.

        The type decides: an attribute of the object alone is no method. But an attribute of the
        object that overrides a method of its type is called instead, as in Python, because the
        owner has set it. A method that torch or Python defines must be on their lists, even if the
        user's class inherits it.
        """
        cls = type(value)
        known: Any = self._methods.get((cls, name))
        if known is None or getattr(cls, name, None) is not known:
            inner = torch_allowlist.maybe_compiled_from(value)
            if inner is not None and _maybe_definer(cls, name) is None:
                return self.method(inner, name)
            known = self._method_of(value, cls, name)
            if len(self._methods) >= _MOST_METHODS:
                self._methods.clear()
            self._methods[cls, name] = known
        if name in getattr(value, "__dict__", ()) and name not in DUNDERS:
            return _stored(value, name)
        bound: Function = known.__get__(value, cls)
        return bound

    def _method_of(self, value: object, cls: type, name: str) -> Any:  # noqa: ANN401
        full_name = f"{label(cls)}.{_printable(name)}"
        if name.startswith("_") and name not in DUNDERS:
            raise NotExposed(f"{full_name} is private: a reference offers public methods only")
        definer = _maybe_definer(cls, name)
        if definer is None:
            if name in getattr(value, "__dict__", {}):
                raise NotExposed(f"{full_name} is not a method", hint=_WRAP_HINT)
            raise AttributeError(f"{cls.__name__!r} object has no attribute {name[:200]!r}")
        is_forward = torch_allowlist.is_forward(value, definer, name)
        if not is_forward and not self._allows(cls, definer, name):
            hint = _WRAP_HINT if _is_builtin_or_torch(definer) else _CLASS_HINT
            raise NotExposed(f"{full_name} is not exposed on this worker", hint=hint)
        if _is_method(vars(definer)[name], definer):
            return vars(definer)[name]
        if is_forward:  # TorchScript makes its forward when it is read from the object
            return property(attrgetter("forward"))
        raise NotExposed(f"{full_name} is not a method", hint=_WRAP_HINT)

    def exception_type(self, name: str) -> type[BaseException] | None:
        """The exception of that name, if it is Python's, gradwire's, exposed or on a list."""
        found = _EXCEPTIONS.get(name) or self._maybe_find(name)
        return found if isinstance(found, type) and issubclass(found, BaseException) else None

    def _maybe_find(self, name: str) -> Function | None:
        sources = (self._maybe_of_user, torch_allowlist.maybe_find, self._maybe_class_function)
        return _first(sources, name)

    def _maybe_of_user(self, name: str) -> Function | None:
        return _first((self._given.get, _maybe_declared, _maybe_in_main), name)

    def _maybe_class_function(self, name: str) -> Function | None:
        """The static or class method that `module:Class.method` names, of an exposed class."""
        owner, _, method = name.rpartition(".")
        cls = self._maybe_of_user(owner)
        if not isinstance(cls, type) or method.startswith("_"):
            return None
        definer = _maybe_definer(cls, method)
        if definer is None or not self._allows(cls, definer, method):
            return None
        raw = vars(definer)[method]
        if not isinstance(raw, staticmethod | classmethod) or not _is_method(raw, definer):
            return None
        return raw.__get__(None, cls)

    def _allows(self, cls: type, definer: type, method: str) -> bool:
        """Whether `method`, defined by `definer`, may be called on objects of `cls`.

        An exposed class exposes the methods that it defines and inherits, except those that torch
        and Python define. A subclass that is not exposed exposes no methods of its own.
        """
        classes = cls.__mro__[: cls.__mro__.index(definer) + 1]
        if _is_builtin_or_torch(definer):
            lists = (_BUILTIN_METHODS, torch_allowlist.methods())
            is_listed = any(method in each.get(base, ()) for each in lists for base in classes)
            return is_listed or self._is_exposed(definer)
        return any(map(self._is_exposed, classes)) or _is_marked(vars(definer)[method])

    def _is_exposed(self, cls: type) -> bool:
        return _is_marked(cls) or self._maybe_of_user(label(cls)) is cls


def _first(sources: Iterable[Callable[[str], Function | None]], name: str) -> Function | None:
    found = (source(name) for source in sources)
    return next((each for each in found if each is not None), None)


def listed(
    expose: Iterable[types.ModuleType | Function],
) -> tuple[types.ModuleType | Function, ...]:
    """What the user wants to expose; an error unless it is a list."""
    if isinstance(expose, types.ModuleType | str) or callable(expose):
        given = expose.__name__ if isinstance(expose, types.ModuleType) else described(expose)
        raise ArgumentTypeError(f"expose is {given}, not a list", hint="pass a list: expose=[...]")
    return tuple(expose)


def _of_module(module: types.ModuleType) -> dict[str, Function]:
    home = one_main(module.__name__)
    return {
        f"{home}:{name}": value
        for name, value in vars(module).items()
        if not name.startswith("_") and _is_defined_as(value, home, name)
    }


def _maybe_declared(name: str) -> Function | None:
    path = _DECLARED.get(name)
    if path is None or is_instance_method(path):
        return None
    found = maybe_at(path)
    return found if callable(found) and _is_marked(found) else None


def _maybe_in_main(name: str) -> Function | None:
    home, _, plain = name.partition(":")
    main = sys.modules.get("__main__")
    if home != "__main__" or main is None or plain.startswith("_"):
        return None
    found = vars(main).get(plain)
    return found if _is_defined_as(found, home, plain) else None


def _is_defined_as(value: object, home: str, name: str) -> bool:
    """Whether `home` defines this function or class under that name: no import, no alias."""
    if not callable(value) or getattr(value, "__qualname__", None) != name:
        return False
    return one_main(getattr(value, "__module__", "")) == home


def _is_method(raw: object, definer: type) -> bool:
    """Whether it is a method, rather than a function of Python or torch set on a user's class."""
    if not isinstance(raw, _METHOD_KINDS):
        return False
    if _is_builtin_or_torch(definer):
        return True
    home = _home_of(getattr(raw, "func", getattr(raw, "__func__", raw)))
    return home == _home_of(definer) or not _is_foreign(home)


def _stored(value: object, name: str) -> Function:
    """The attribute of an object that overrides a method of its class, if it may be called.

    Functions of Python or torch are refused, except on modules: torch itself sets compiled and
    scripted methods there.
    """
    stored: Function = vars(value)[name]
    found: object = stored
    while isinstance(found, functools.partial):
        found = found.func
    home = _home_of(getattr(found, "__func__", found))
    if not callable(found) or (_is_foreign(home) and not isinstance(value, Module)):
        full_name = f"{label(type(value))}.{_printable(name)}"
        raise NotExposed(f"{full_name} is not a method", hint=_WRAP_HINT)
    return stored


def mark_exposed(cls: type) -> None:
    """Let peers use objects of a class, whatever its name leads to now."""
    setattr(cls, _MARK, True)


def _is_marked(target: object) -> bool:
    return getattr(target, "__dict__", {}).get(_MARK) is True


def _home_of(target: object) -> str:
    return str(getattr(target, "__module__", None)).partition(".")[0]


def _is_foreign(home: str) -> bool:
    return home == "torch" or home in sys.stdlib_module_names


def _is_builtin_or_torch(definer: type) -> bool:
    return _home_of(definer) in ("builtins", "torch")


def _maybe_definer(cls: type, attribute: str) -> type | None:
    return next((base for base in cls.__mro__ if attribute in vars(base)), None)


def _printable(name: str) -> str:
    """A peer's string, made safe for errors and logs."""
    return name if name.isprintable() and 0 < len(name) <= 200 else repr(name[:200])
