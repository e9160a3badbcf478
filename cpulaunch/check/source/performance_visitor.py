"""Where torchfix's performance rules apply: a dependency, so that its rules are not written again."""

import ast
from collections.abc import Sequence

HEAD = "from torch.utils.data import DataLoader"
MAX_CALL = 10_000
"""Characters of a call for libcst, whose parser overflows the stack, which ends the process, some levels deeper than
6,000: of operands of `or`, for which four characters suffice, or of `for` in a comprehension."""


def synchronized_loaders(calls: Sequence[ast.Call]) -> list[ast.Call]:
    """Those of some calls of DataLoader that torchfix finds to load in the same process (TOR401).

    torchfix gets a program of these calls alone: it takes seconds for a large file, and libcst, by which it reads
    programs, cannot parse all that Python can. None are found if that is so of the calls.
    A call longer than MAX_CALL is passed over.
    """
    import libcst
    from torchfix.visitors.performance import TorchSynchronizedDataLoaderVisitor

    lines, by_line = [HEAD], {}
    for call in calls:
        text = ast.unparse(ast.Call(ast.Name("DataLoader"), call.args, call.keywords))
        if len(text) <= MAX_CALL:
            by_line[len(lines) + 1] = call
            lines += text.split("\n")
    visitor = TorchSynchronizedDataLoaderVisitor()
    try:
        libcst.MetadataWrapper(libcst.parse_module("\n".join(lines))).visit_batched([visitor])
    except (libcst.ParserSyntaxError, RecursionError):
        return []
    found = {each.line for each in visitor.violations if each.error_code == "TOR401"}
    return [call for line, call in by_line.items() if line in found]
