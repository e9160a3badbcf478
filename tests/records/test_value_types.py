"""A value's text, as a command line has it, and back."""

import pytest

from cpulaunch.records import value_types as types

CASES = {
    "switch on": (types.FLAG, "true"),
    "switch off": (types.FLAG, "false"),
    "integer": (types.integer(minimum=0), "12"),
    "bounded integer": (types.integer(minimum=0, maximum=4), "4"),
    "count": (types.count('int | Literal["auto"]'), "3"),
    "word of a count": (types.count('int | Literal["auto"]'), "auto"),
    "whole seconds": (types.number(minimum=0.0), "30"),
    "parts of a second": (types.number(minimum=0.0), "0.1"),
    "choice": (types.choice('Literal["spread", "compact"]'), "compact"),
    "file": (types.FILE, "x/y"),
    "pattern": (types.PATTERN, "([0-9]+),"),
    "CPU list": (types.CPULIST, "0-3,8"),
    "text": (types.WORD, "a:b"),
    "words": (types.WORDS, "SIGINT,SIGTERM"),
    "filters with a comma": (types.FILTERS, "a,,b,c"),
    "one number of hosts": (types.RANGE, "2"),
    "range of hosts": (types.RANGE, "1:4"),
    "port": (types.PORT, "29500"),
    "pairs": (types.PAIRS, "a=b,c=1"),
    "one stream": (types.STREAMS, "3"),
    "streams by rank": (types.STREAMS, "0:3,1:1"),
    "names": (types.NAMES, "auto,mine.toml"),
    "assignment": (types.ASSIGNMENTS, "A=b=c,d"),
}


@pytest.mark.parametrize(("value_type", "text"), CASES.values(), ids=CASES)
def test_a_value_is_written_as_it_is_read(value_type, text):
    assert value_type.to_text(value_type.from_text(text)) == text


@pytest.mark.parametrize("value", ["5", "-1", "1.0", "", "x"])
def test_a_bounded_integer_names_its_bounds(value):
    level = types.integer(minimum=0, maximum=4)
    with pytest.raises(ValueError, match="a whole number from 0 to 4"):
        level.from_text(value)
    with pytest.raises(ValueError, match="a whole number"):
        level.from_toml(value)
    assert (level.from_toml(4), level.metavar) == (4, "0-4")
