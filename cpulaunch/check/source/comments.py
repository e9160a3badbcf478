"""Comments that silence findings: `# cpulaunch: ignore[ID, ID]` for a line, `# cpulaunch: ignore-file`."""

import io
import re
import tokenize
from collections.abc import Mapping

COMMENT = re.compile(r"#\s*cpulaunch:\s*(ignore-file|ignore)(?![-\w])(?:\s*\[([^\]]*)\])?")
ALL = frozenset({"*"})


def ignored(text: str) -> Mapping[int, frozenset[str]]:
    """Line -> the rules that are silent there, "*" for all; line 0 stands for the whole file."""
    found: dict[int, frozenset[str]] = {}
    if "cpulaunch:" not in text:
        return found
    try:
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.COMMENT and (match := COMMENT.search(token.string)):
                ids = frozenset(each.strip() for each in match[2].split(",")) if match[2] is not None else ALL
                line = 0 if match[1] == "ignore-file" else token.start[0]
                found[line] = found.get(line, frozenset()) | ids
    except (tokenize.TokenError, SyntaxError):
        return found  # What follows has no tokens; parsing the file says what is wrong with it.
    return found


def is_ignored(rule: str, lines: tuple[int, int], comments: Mapping[int, frozenset[str]]) -> bool:
    """Whether comments silence a rule for a statement between two lines."""
    places = (0, *range(lines[0], min(lines[1], lines[0] + 200) + 1))
    return any(comments.get(line, frozenset()) & {rule, "*"} for line in places if line in comments)
