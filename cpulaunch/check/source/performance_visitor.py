"""Where torchfix's performance rules apply: a dependency, so that its rules are not written again."""

from functools import lru_cache

from cpulaunch.check.source.program import lines_of


@lru_cache(maxsize=4)
def torchfix_places(text: str, code: str) -> frozenset[tuple[int, int]]:
    """Lines and columns (from zero, in bytes) of what torchfix finds under a code in a program's text.

    Empty if libcst, by which torchfix reads programs, cannot parse what Python can.
    """
    import libcst
    from torchfix.visitors.performance import TorchSynchronizedDataLoaderVisitor

    visitor = TorchSynchronizedDataLoaderVisitor()
    try:
        libcst.MetadataWrapper(libcst.parse_module(text)).visit_batched([visitor])
    except libcst.ParserSyntaxError:
        return frozenset()
    lines = lines_of(text)
    return frozenset(
        (each.line, len(lines[each.line - 1][: each.column].encode()))
        for each in visitor.violations
        if each.error_code == code
    )
