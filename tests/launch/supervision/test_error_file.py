"""The exception in the file that a rank records it in."""

import json
import re

import pytest

from cpulaunch.launch.supervision.error_file import (
    MAX_MARK,
    MAX_TRACEBACK,
    RankError,
    copy_error_file,
    read_error,
    shortened,
)

RECORDED = {
    "message": {
        "message": "ValueError: no",
        "extraInfo": {
            "py_callstack": "Traceback (most recent call last):\nValueError: no\n",
            "timestamp": "1700000000",
        },
    }
}


@pytest.mark.parametrize(
    ("content", "error"),
    [
        (RECORDED, RankError(text="Traceback (most recent call last):\nValueError: no", timestamp=1700000000)),
        ({"message": "short", "timestamp": 17}, RankError(text="short", timestamp=17)),
        ({"message": "short"}, RankError(text="short")),
        ({"message": {"message": "ValueError: no"}}, RankError(text="ValueError: no")),
        ({"message": {"message": "x", "extraInfo": [1]}}, RankError(text="x")),
        ({"message": {"message": "x", "extraInfo": {"timestamp": "soon"}}}, RankError(text="x")),
        ({"message": "x", "timestamp": True}, RankError(text="x")),
        ({"message": "x", "timestamp": 10**300}, RankError(text="x")),
        ({"message": {"message": "x", "extraInfo": {"timestamp": "9" * 20}}}, RankError(text="x")),
        ({"message": {"message": "x", "extraInfo": {"timestamp": "9" * 5000}}}, RankError(text="x")),
        ({"message": {"message": "x" * MAX_TRACEBACK + "\n"}}, RankError(text="x" * MAX_TRACEBACK)),
        ({"message": 3}, None),
        ({"message": {"message": [["x"]]}}, None),
        ({"message": {"message": "x", "extraInfo": {"py_callstack": {"a": 1}}}}, None),
        ({}, None),
        ([1], None),
    ],
)
def test_errors_are_read_as_torch_writes_them(tmp_path, content, error):
    path = tmp_path / "error.json"
    path.write_text(json.dumps(content))
    assert read_error(str(path)) == error


@pytest.mark.parametrize("message", ["{}", {"message": "{}"}, {"extraInfo": {"py_callstack": "{}\n"}}])
def test_both_ends_of_a_long_traceback_are_kept(tmp_path, message):
    path = tmp_path / "error.json"
    long = "Traceback\n" + "x\n" * MAX_TRACEBACK + "ValueError: no"
    path.write_text(json.dumps({"message": message}).replace("{}", json.dumps(long)[1:-1]))
    text = read_error(str(path)).text
    assert text.startswith("Traceback\nx\n")
    assert text.endswith("x\nValueError: no")
    assert MAX_TRACEBACK - MAX_MARK < len(text) <= MAX_TRACEBACK
    start, left_out, end = re.fullmatch(
        r"(.*)\n\.\.\. ([0-9,]+) characters left out \.\.\.\n(.*)", text, re.DOTALL
    ).groups()
    assert len(start) + int(left_out.replace(",", "")) + len(end) == len(long)
    assert shortened(text) == text


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b'"text"', b"[" * 100_000])
def test_another_format_is_no_error(tmp_path, content):
    path = tmp_path / "error.json"
    path.write_bytes(content)
    assert read_error(str(path)) is None
    copy_error_file(str(path), str(tmp_path / "why.json"), exit_code=1)


@pytest.mark.parametrize("path", ["", "/nonexistent/error.json", "/"])
def test_no_file_is_no_error(path):
    assert read_error(path) is None
