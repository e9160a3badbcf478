"""Which configurations to try first: what is known to help, then single changes of the best one so far."""

from __future__ import annotations

from cpulaunch.measure.tuning.space import within

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from cpulaunch.measure.tuning.space import Configuration, Dimension

MAX_PAST = 2


def first_configurations(
    space: Sequence[Dimension], *, levels: Iterable[Configuration], past: Iterable[Configuration]
) -> tuple[Configuration, ...]:
    """The default, the best ones of past studies, and the optimization levels, as far as the space has their values.

    Of a level whose settings are not all in the space, those that are count.
    """
    names = {dimension.name: dimension.values for dimension in space}
    parts = [{name: value for name, value in level.items() if value in names.get(name, ())} for level in levels]
    known = [within(each, space) for each in past]
    wanted = [{}, *[each for each in known if each][:MAX_PAST], *(within(each, space) for each in parts)]
    found: dict[tuple[tuple[str, object], ...], Configuration] = {}
    for each in wanted:
        if each is not None:
            found.setdefault(tuple(each.items()), each)
    return tuple(found.values())


def neighbours(best: Configuration, space: Sequence[Dimension]) -> Iterator[Configuration]:
    """The configurations that differ from the best one in one setting, in the order of the space."""
    for dimension in space:
        for value in dimension.values:
            if value != best.get(dimension.name):
                changed = {**best, dimension.name: value}
                yield {each.name: changed[each.name] for each in space if changed.get(each.name) is not None}
