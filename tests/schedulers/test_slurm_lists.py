import pytest

from cpulaunch.schedulers.slurm_lists import expand_counts, expand_hosts


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("n1", "n1"),
        ("n[1-2]", "n1 n2"),
        ("n[01-03,7],m1", "n01 n02 n03 n7 m1"),
        ("n[098-101]", "n098 n099 n100 n101"),
        ("r[1-2]c[0-1]-ib", "r1c0-ib r1c1-ib r2c0-ib r2c1-ib"),
        ("a,b[3],c", "a b3 c"),
        ("gpu-a100-[5,3]", "gpu-a100-5 gpu-a100-3"),
    ],
)
def test_names(text, names):
    assert expand_hosts(text) == tuple(names.split())


@pytest.mark.parametrize(
    "text", ["", "n[1-2", "n1]", "n[2-1]", "n[a-b]", "n[]", "n[1-99999999]", "a,,b", "n[[1]]", "n[1-]"]
)
def test_malformed_names(text):
    with pytest.raises(ValueError, match=r"."):
        expand_hosts(text)


@pytest.mark.parametrize(
    ("text", "counts"), [("1", (1,)), ("2(x2)", (2, 2)), ("2,1", (2, 1)), ("16(x2),8,4(x3)", (16, 16, 8, 4, 4, 4))]
)
def test_counts(text, counts):
    assert expand_counts(text) == counts


@pytest.mark.parametrize("text", ["", "x", "2(x", "2(x)", "2(xa)", "-1", "1(x99999999)"])
def test_malformed_counts(text):
    with pytest.raises(ValueError, match=r"."):
        expand_counts(text)


ABSURD = {
    "zeros": "n[" + "0" * 100_000 + "0-65535]",
    "brackets": "n" + "[1]" * 5000,
    "a long name": "n" * 300,
    "a long list": "a," * 600_000,
    "a product of ranges": "n" + "[0-65535]" * 16,
}


@pytest.mark.parametrize("text", ABSURD.values(), ids=ABSURD)
def test_an_absurd_list_is_refused_at_once(text):
    with pytest.raises(ValueError, match=r"more than|at most|malformed") as caught:
        expand_hosts(text)
    assert len(str(caught.value)) < 100


@pytest.mark.parametrize("text", ["9" * 5000, "1(x" + "9" * 5000], ids=["number", "repetitions"])
def test_an_absurd_count_is_malformed(text):
    with pytest.raises(ValueError, match=r"malformed part '.{40}'"):
        expand_counts(text)
