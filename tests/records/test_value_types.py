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


ABSURD = {
    "instances": (types.count('int | Literal["auto"]'), "9999999", "from 1 to 16384"),
    "ranks": (types.count('int | Literal["auto", "cpu"]'), "99999999999999", "from 1 to 16384"),
    "cores": (types.size(minimum=1), "16385", "from 1 to 16384"),
    "digits": (types.size(minimum=1), "9" * 100_000, "expected a whole number"),
    "restarts": (types.integer(minimum=0), "99999999999", "from 0 to 2147483647"),
    "hosts": (types.RANGE, "1:99999999", "from 1 to 65536"),
    "seconds": (types.number(minimum=0.0), "1e300", "at most 1000000 seconds"),
    "digits of seconds": (types.number(minimum=0.0), "9" * 10_000, "a finite number"),
    "a name that is not UTF-8": (types.WORD, "job\udcff", "expected text in UTF-8"),
    "a pair that is not UTF-8": (types.PAIRS, "a=\udcff", "expected text in UTF-8"),
    "seconds in a pair": (types.PAIRS, "a=b,timeout=99999999999", "expected timeout of at most 2147483647"),
    "digits in a pair": (types.PAIRS, "timeout=" + "9" * 5000, "expected timeout of at most 2147483647"),
    "digits of a rank": (types.STREAMS, "9" * 5000 + ":1", "RANK:N"),
    "CPUs": (types.CPULIST, "0-16384," * 16_000, "listed twice"),
    "repetitions": (types.PATTERN, "a{99999999999}(x)", "expected a regular expression"),
    "nested groups": (types.PATTERN, "(" * 900 + "x" + ")" * 900, "too many nested groups"),
    "a long pattern": (types.PATTERN, "(x)" + "y" * 5000, "at most 2000 characters"),
}


@pytest.mark.parametrize(("value_type", "text", "message"), ABSURD.values(), ids=ABSURD)
def test_an_absurd_value_is_refused_in_a_sentence(value_type, text, message):
    with pytest.raises(ValueError, match=message) as caught:
        value_type.from_text(text)
    assert len(str(caught.value)) < 300
