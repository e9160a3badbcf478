"""`@record`: frozen, slotted, keyword-only data classes that are cheap to define.

`dataclasses.dataclass` compiles the methods of every class: about 1 ms each, and 20 ms for the import. For the sixty
classes of a launch, that is more than all of its other work. The methods of records are shared functions instead.
Type checkers and `dataclasses.replace`, `fields` and `asdict` treat a record as a dataclass.

For the same reason the modules of a launch import `typing` and `collections.abc` for type checkers only: at run time
the two imports would take as long as the start of Python.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, NoReturn, TypeVar, dataclass_transform, overload

    T = TypeVar("T")
else:

    def dataclass_transform(**_: object) -> object:
        """The run-time substitute for typing.dataclass_transform."""
        return lambda function: function


class Field:
    """A field's default value or factory, with metadata."""

    __slots__ = ("default", "factory", "metadata")

    def __init__(self, default: Any, factory: Callable[[], Any] | None, metadata: dict[str, Any]) -> None:
        self.default = default
        self.factory = factory
        self.metadata = metadata


def field(*, default: Any = None, default_factory: Callable[[], Any] | None = None, **metadata: Any) -> Any:
    """A field with a default value or a factory of default values; further arguments are its metadata."""
    return Field(default, default_factory, metadata)


if TYPE_CHECKING:

    @overload
    def record(cls: type[T]) -> type[T]: ...
    @overload
    def record(*, kw_only: bool = True) -> Callable[[type[T]], type[T]]: ...


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(field,))
def record(cls: type[T] | None = None, *, kw_only: bool = True) -> Any:
    """A class with the annotated fields: immutable, compared and hashed by value, without a `__dict__`."""
    if cls is None:
        return lambda body: _make(body, kw_only)
    return _make(cls, kw_only)


def _make(body: type, kw_only: bool) -> type:
    names = tuple(body.__annotations__)
    namespace = {name: value for name, value in vars(body).items() if name not in ("__dict__", "__weakref__")}
    defaults = {name: namespace.pop(name) for name in names if name in namespace}
    namespace |= {
        "__slots__": names,
        "_defaults": defaults,
        "_positional": () if kw_only else names,
        "__init__": _init,
        "__setattr__": _refuse,
        "__delattr__": _refuse,
        "__eq__": _equal,
        "__hash__": _hash,
        "__repr__": namespace.get("__repr__", _repr),
        "__reduce__": _reduce,
        "__dataclass_fields__": _OfDataclass(),
        "__dataclass_params__": _OfDataclass(),
    }
    return type(body.__name__, body.__bases__, namespace)


def _init(self: Any, *args: Any, **values: Any) -> None:
    cls = type(self)
    if args:
        if len(args) > len(cls._positional):
            raise TypeError(f"{cls.__name__} takes {len(cls._positional)} positional values, {len(args)} given")
        values |= zip(cls._positional, args, strict=False)
    defaults = cls._defaults
    put = object.__setattr__
    for name in cls.__slots__:
        if name in values:
            value = values.pop(name)
        elif name in defaults:
            value = defaults[name]
            if type(value) is Field:
                value = value.factory() if value.factory else value.default
        else:
            raise TypeError(f"{cls.__name__} needs a value for {name!r}")
        put(self, name, value)
    if values:
        raise TypeError(f"{cls.__name__} has no field {', '.join(map(repr, values))}")


def _refuse(self: Any, name: str, value: object = None) -> NoReturn:
    raise AttributeError(f"{type(self).__name__} is frozen: {name!r} cannot change")


def _values(self: Any) -> tuple[Any, ...]:
    return tuple(getattr(self, name) for name in self.__slots__)


def _equal(self: Any, other: object) -> bool:
    return _values(self) == _values(other) if type(other) is type(self) else NotImplemented


def _hash(self: Any) -> int:
    return hash(_values(self))


def _repr(self: Any) -> str:
    values = ", ".join(f"{name}={getattr(self, name)!r}" for name in self.__slots__)
    return f"{type(self).__qualname__}({values})"


def _reduce(self: Any) -> tuple[Any, ...]:
    return _rebuild, (type(self), {name: getattr(self, name) for name in self.__slots__})


def _rebuild(cls: type, values: dict[str, Any]) -> Any:
    return cls(**values)


def replace(original: T, **changes: Any) -> T:
    """A copy of a record with some fields changed. Raises: TypeError for a name that is no field."""
    cls = type(original)
    values: dict[str, Any] = {name: getattr(original, name) for name in fields(cls)}
    return cls(**values | changes)


def fields(cls: type) -> dict[str, Field]:
    """Every field of a record class with its default and metadata, in order; a default of None where there is none."""
    defaults: dict[str, Any] = cls._defaults  # type: ignore[attr-defined]
    return {
        name: value if type(value := defaults.get(name)) is Field else Field(value, None, {})
        for name in cls.__slots__  # type: ignore[attr-defined]
    }


class _OfDataclass:
    """An attribute that dataclasses have, taken from an equal dataclass when it is first read."""

    __slots__ = ("name", "value")

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, instance: object, owner: Any) -> Any:
        if not hasattr(self, "value"):
            self.value = getattr(_twin(owner), self.name)
        return self.value


def _twin(cls: Any) -> type:
    """A dataclass with this record's fields."""
    import dataclasses

    named = [(name, cls.__annotations__[name]) for name in cls.__slots__]
    return dataclasses.make_dataclass(cls.__name__, named, kw_only=True, frozen=True)
