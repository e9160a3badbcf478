"""A record behaves as the frozen, slotted, keyword-only dataclass it stands for."""

import dataclasses
import pickle
from dataclasses import dataclass

import pytest

from cpulaunch.records.record import field, fields, record


@record
class Core:
    """A record with a default, a factory, a property and a method."""

    id: int
    cpus: frozenset[int] = frozenset()
    notes: dict[str, str] = field(default_factory=dict)

    @property
    def smt(self) -> bool:
        """Whether siblings share the core."""
        return len(self.cpus) > 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Twin:
    """The same, by the standard library."""

    id: int
    cpus: frozenset[int] = frozenset()
    notes: dict[str, str] = dataclasses.field(default_factory=dict)


@record(kw_only=False)
class Pair:
    """A record that takes its values by position too."""

    first: int
    second: int = 2


def test_values_defaults_and_methods():
    core = Core(id=1, cpus=frozenset({1, 2}))
    assert (core.id, core.notes, core.smt) == (1, {}, True)
    assert Core(id=1).notes is not Core(id=1).notes
    assert repr(core).replace("Core", "Twin") == repr(Twin(id=1, cpus=frozenset({1, 2})))
    assert Core.__doc__ == "A record with a default, a factory, a property and a method."


def test_equality_and_hash_are_by_value_and_class():
    assert Pair(1) == Pair(1, 2) == Pair(second=2, first=1)
    assert hash(Pair(1)) == hash(Pair(1, 2))
    assert Pair(1) != Pair(3)
    assert Core(id=1) != Twin(id=1)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Core(), "needs a value for 'id'"),
        (lambda: Core(id=1, colour=2), "no field 'colour'"),
        (lambda: Core(1), "positional"),
        (lambda: Pair(1, 2, 3), "positional"),
    ],
)
def test_wrong_values_are_type_errors(make, message):
    with pytest.raises(TypeError, match=message):
        make()


def test_frozen_and_slotted():
    core = Core(id=1)
    with pytest.raises(AttributeError, match="frozen"):
        core.id = 2
    with pytest.raises(AttributeError, match="frozen"):
        core.other = 2
    with pytest.raises(AttributeError, match="frozen"):
        del core.id
    assert not hasattr(core, "__dict__")


def test_records_work_with_dataclasses():
    core = Core(id=1, notes={"a": "b"})
    assert dataclasses.replace(core, id=2) == Core(id=2, notes={"a": "b"})
    assert dataclasses.asdict(core) == {"id": 1, "cpus": frozenset(), "notes": {"a": "b"}}
    assert dataclasses.is_dataclass(Core)
    assert Core.__dataclass_params__.frozen  # Dynamo of torch 2.5 reads it of whatever is a dataclass.
    assert [f.name for f in dataclasses.fields(Core)] == ["id", "cpus", "notes"]
    assert pickle.loads(pickle.dumps(core)) == core
    assert list(fields(Core)) == ["id", "cpus", "notes"]
