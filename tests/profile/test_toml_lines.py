"""The line numbers of keys in TOML of every notation."""

import pytest

from cpulaunch.profile.toml_lines import key_lines, line_of

TEXT = '''\
# comment = 1
a = """
b = 2
[not.a.table]
\\""" """
"q = 1" = 'x' # c = 3
list = [
  1, # [x]
  [2, 3],
]
d.e . f = { g = 1, h = [ "]" ] }
[t.u]
k = '\'\'
l = 1
\'\'\'
m = 1.5
[ "v w" . 'x' ]
y = 2026-11-21
[[z]]
n = 1
[[z]]
n = 2
[z.sub]
o = 1
[[z.deep]]
p = 1
'''.replace("k = '''", "k = '''")

LINES = {
    ("a",): 2,
    ("q = 1",): 6,
    ("list",): 7,
    ("d",): 11,
    ("d", "e", "f"): 11,
    ("t", "u"): 12,
    ("t", "u", "k"): 13,
    ("t", "u", "m"): 16,
    ("v w", "x"): 17,
    ("v w", "x", "y"): 18,
    ("z", 0): 19,
    ("z", 0, "n"): 20,
    ("z", 1): 21,
    ("z", 1, "n"): 22,
    ("z", 1, "sub"): 23,
    ("z", 1, "sub", "o"): 24,
    ("z", 1, "deep", 0, "p"): 26,
}


@pytest.mark.parametrize("path", LINES, ids=lambda path: ".".join(map(str, path)))
def test_the_line_of_a_key(path):
    assert key_lines(TEXT)[path] == LINES[path]


def test_the_text_of_this_test_is_toml():
    import tomllib

    assert tomllib.loads(TEXT)["z"][1]["deep"][0]["p"] == 1


def test_strings_and_arrays_contain_no_keys():
    found = key_lines(TEXT)
    assert not {("b",), ("not",), ("c",), ("x",), ("t", "u", "l")} & set(found)


def test_an_unknown_key_has_the_line_of_its_table():
    lines = key_lines(TEXT)
    assert line_of(("d", "e", "f", "g"), lines) == 11
    assert line_of(("z", 1, "absent"), lines) == 21
    assert line_of(("nowhere",), lines) is None
