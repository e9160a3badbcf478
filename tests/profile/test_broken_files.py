"""Broken and hostile profiles: each is an error that names file, line and key; none hangs or ends in a traceback."""

import os

import pytest

from cpulaunch.profile.file import MAX_BYTES, parse_profile, profile_errors, read_profile
from cpulaunch.records.errors import UsageError
from tests.opens import opens

HEAD = 'kind = "intent"\nsummary = "s"\n'
SERVER = 'kind = "server"\nsummary = "s"\n[applies]\narch = "x86_64"\n'
REASON = 'reason = "r"\n'


def setting(name, value, more=""):
    return f"[settings.{name}]\nvalue = {value}\n{REASON}{more}"


def env(name, value='"1"', more=""):
    return f"[env.{name}]\nvalue = {value}\n{REASON}{more}"


BROKEN = {
    # name: (text, what, value, line and key after the file name, part of the hint)
    "not TOML": (HEAD + "x = = 1", "invalid TOML", "Invalid value", ", line 3", "docs/profiles.md"),
    "unterminated": (HEAD + 'x = "', "invalid TOML", "Unterminated string", ", line 3", ""),
    "key twice": (HEAD + 'kind = "intent"', "invalid TOML", "Cannot overwrite a value", ", line 3", ""),
    "digits": (HEAD + "x = [\n" + "9" * 1999 + "\n]", "unknown key in the profile", "x", ", line 3, x", ""),
    "nested arrays": ("x = " + "[\n" * 9000, "invalid TOML", "nested too deeply", "", ""),
    "nested tables": ("x = " + "{a=[\n" * 9000, "invalid TOML", "nested too deeply", "", ""),
    "empty": ("", "the profile lacks key 'summary'", "None", ", summary", "add summary"),
    "no kind": ('summary = "s"', "the profile lacks key 'kind'", "None", ", kind", "add kind"),
    "kind": ('summary = "s"\nkind = "robot"', "invalid value", '"robot', ", line 2, kind", "intent"),
    "summary": ('summary = 3\nkind = "intent"', "invalid value", "3", ", line 1, summary", "a string"),
    "escape": ('summary = "\\u001b[2J"\nkind = "intent"', "invalid value", '"?[2J', ", line 1, summary", ""),
    "top key": (
        HEAD + "sumary = 1",
        "unknown key in the profile",
        "sumary",
        ", line 3, sumary",
        "did you mean summary?",
    ),
    "no applies": (
        'kind = "server"\nsummary = "s"',
        "the profile lacks key 'applies'",
        "None",
        ", applies",
        "[applies]",
    ),
    "applies empty": (HEAD + "[applies]", "expected conditions", "{}", ", line 3, applies", ""),
    "applies text": ('applies = "all"\n' + HEAD, "expected conditions", '"all', ", line 1, applies", ""),
    "condition": (
        HEAD + "[applies]\ncolour = 1",
        "unknown key in the profile",
        "colour",
        ", line 4, applies.colour",
        "",
    ),
    "second alternative": (
        HEAD + "[[applies]]\nquota = true\n\n[[applies]]\n# a comment\nquota = 1\n",
        "invalid value",
        "1",
        ", line 8, applies.1.quota",
        "true or false",
    ),
    "models": (HEAD + '[applies]\nmodels = ["a"]', "invalid value", '["a"]', ", line 4, applies.models", ""),
    "range": (
        HEAD + "[applies]\nmodels = [[9, 1]]",
        "invalid value",
        "[[9, 1]]",
        ", line 4, applies.models",
        "",
    ),
    "bool model": (HEAD + "[applies]\nfamily = true", "invalid value", "true", ", line 4, applies.family", ""),
    "feature": (
        HEAD + '[applies]\nfeatures = ["avx9"]',
        "invalid value",
        '["avx9"]',
        ", line 4, applies.features",
        "unknown feature 'avx9'",
    ),
    "settings": (HEAD + "settings = 1", "expected a table", "1", ", line 3, settings", "[settings]"),
    "short form": (
        HEAD + '[settings]\nopenmp = "intel"',
        "expected a table",
        '"intel',
        ", line 4, settings.openmp",
        "[settings.openmp]",
    ),
    "setting": (
        HEAD + setting("alocator", '"jemalloc"'),
        "unknown setting",
        "alocator",
        ", line 3, settings.alocator",
        "did you mean allocator?",
    ),
    "not for profiles": (
        HEAD + setting("cpus", '"0-3"'),
        "a profile cannot contain this setting",
        "cpus",
        ", line 3, settings.cpus",
        "--cpus",
    ),
    "wrong type": (
        HEAD + setting("smt", '"no"'),
        "invalid value",
        '"no',
        ", line 4, settings.smt.value",
        "true or false",
    ),
    "wrong word": (
        HEAD + setting("allocator", '"malloc"'),
        "invalid value",
        '"malloc',
        ", line 4, settings.allocator.value",
        "tcmalloc",
    ),
    "infinite": (
        HEAD + setting("grace", "inf"),
        "invalid value",
        "inf",
        ", line 4, settings.grace.value",
        "finite",
    ),
    "negative": (
        HEAD + setting("reserve", "-1"),
        "invalid value",
        "-1",
        ", line 4, settings.reserve.value",
        "",
    ),
    "inline": (
        HEAD + '[settings]\nsmt = { value = 3, reason = "r" }',
        "invalid value",
        "3",
        ", line 4, settings.smt.value",
        "",
    ),
    "dotted": (
        HEAD + 'settings.smt.reason = "r"\nsettings.smt."value" = 3',
        "invalid value",
        "3",
        ", line 4, settings.smt.value",
        "",
    ),
    "no value": (
        HEAD + "[settings.openmp]\n" + REASON,
        "settings.openmp lacks key 'value'",
        "None",
        ", line 3, settings.openmp.value",
        'value = "auto"',
    ),
    "no reason": (
        HEAD + "[settings.smt]\nvalue = true",
        "settings.smt lacks key 'reason'",
        "None",
        ", line 3, settings.smt.reason",
        "one line",
    ),
    "setting's key": (
        HEAD + setting("smt", "true", "why = 1"),
        "unknown key in the profile",
        "why",
        ", line 6, settings.smt.why",
        "",
    ),
    "source": (
        HEAD + setting("smt", "true", 'source = "a blog"'),
        "invalid value",
        '"a blog',
        ", line 6, settings.smt.source",
        "a URL",
    ),
    "script as source": (
        HEAD + setting("smt", "true", 'source = "javascript:alert(1)"'),
        "invalid value",
        '"javascript:alert(1)',
        ", line 6, settings.smt.source",
        "",
    ),
    "date": (
        HEAD + setting("smt", "true", 'date = "2026-11-21"'),
        "invalid value",
        '"2026-11-21',
        ", line 6, settings.smt.date",
        "without quotes",
    ),
    "date and time": (
        HEAD + setting("smt", "true", "date = 2026-11-21T10:00:00"),
        "invalid value",
        "2026-11-21T10:00:00",
        ", line 6, settings.smt.date",
        "",
    ),
    "long reason": (
        HEAD + f'[settings.smt]\nvalue = true\nreason = "{"x" * 501}"',
        "invalid value",
        '"' + "x" * 56 + "...",
        ", line 5, settings.smt.reason",
        "at most 500",
    ),
    "reason of lines": (
        HEAD + '[settings.smt]\nvalue = true\nreason = """a\nb"""',
        "invalid value",
        '"a?b"',
        ", line 5, settings.smt.reason",
        "one line",
    ),
    "number for a variable": (
        HEAD + env("MALLOC_ARENA_MAX", "1"),
        "invalid value",
        "1",
        ", line 4, env.MALLOC_ARENA_MAX.value",
        "a string",
    ),
    "owned variable": (
        HEAD + env("OMP_NUM_THREADS"),
        "a profile cannot set this variable",
        "OMP_NUM_THREADS",
        ", line 3, env.OMP_NUM_THREADS",
        "[settings.threads]",
    ),
    "preload": (
        HEAD + env("LD_PRELOAD"),
        "a profile cannot set this variable",
        "LD_PRELOAD",
        ", line 3, env.LD_PRELOAD",
        "[settings.allocator]",
    ),
    "loader": (
        HEAD + env("LD_AUDIT"),
        "a profile cannot set this variable",
        "LD_AUDIT",
        ", line 3, env.LD_AUDIT",
        "--env",
    ),
    "code": (
        HEAD + env("PYTHONPATH"),
        "a profile cannot set this variable",
        "PYTHONPATH",
        ", line 3, env.PYTHONPATH",
        "--env",
    ),
    "rank": (
        HEAD + env("LOCAL_RANK"),
        "a profile cannot set this variable",
        "LOCAL_RANK",
        ", line 3, env.LOCAL_RANK",
        "",
    ),
    "wrong results": (
        HEAD + env("OMP_DYNAMIC", '"TRUE"'),
        "a profile cannot set this variable",
        "OMP_DYNAMIC",
        ", line 3, env.OMP_DYNAMIC",
        "pytorch#168965",
    ),
    "two runtimes": (
        HEAD + env("KMP_DUPLICATE_LIB_OK"),
        "a profile cannot set this variable",
        "KMP_DUPLICATE_LIB_OK",
        ", line 3, env.KMP_DUPLICATE_LIB_OK",
        "two OpenMP runtimes",
    ),
    "hang": (
        HEAD + env("KMP_FORKJOIN_BARRIER_PATTERN", '"dist,dist"'),
        "a profile cannot set this variable",
        "KMP_FORKJOIN_BARRIER_PATTERN",
        ", line 3, env.KMP_FORKJOIN_BARRIER_PATTERN",
        "llvm-project#80664",
    ),
    "variable's name": (
        HEAD + '[env."A=B"]\nvalue = "1"\n' + REASON,
        "a profile cannot set this variable",
        "A=B",
        ", line 3, env.A=B",
        "not the name",
    ),
}

CONTRADICTIONS = {
    "active under a quota": (
        'kind = "situation"\nsummary = "s"\n[applies]\nquota = true\n' + setting("wait_policy", '"active"'),
        ", line 6, settings.wait_policy.value",
        "quota",
    ),
    "pinned under a quota": (
        'kind = "situation"\nsummary = "s"\n[applies]\nquota = true\n' + setting("affinity", '"close"'),
        ", line 6, settings.affinity.value",
        "quota",
    ),
    "explicit without a binder": (
        HEAD + setting("affinity", '"explicit"') + setting("binder", '"none"'),
        ", line 4, settings.affinity.value",
        "binder is none",
    ),
    "taskset places no memory": (
        HEAD + setting("binder", '"taskset"') + setting("membind", '"bind"'),
        ", line 7, settings.membind.value",
        "numactl",
    ),
    "MKL dispatch on Intel": (
        SERVER + 'vendor = "GenuineIntel"\n' + setting("mkl_dispatch", '"on"'),
        ", line 7, settings.mkl_dispatch.value",
        "AMD",
    ),
    "Intel's OpenMP on Arm": (
        SERVER.replace("x86_64", "aarch64") + setting("openmp", '"intel"'),
        ", line 6, settings.openmp.value",
        "x86_64",
    ),
    "KMP variables for libgomp": (
        HEAD + setting("openmp", '"default"') + env("KMP_SETTINGS"),
        ", line 4, settings.openmp.value",
        "KMP_",
    ),
    "jemalloc's variable for tcmalloc": (
        HEAD + setting("allocator", '"tcmalloc"') + env("MALLOC_CONF"),
        ", line 4, settings.allocator.value",
        "MALLOC_CONF",
    ),
    "two engines": (
        HEAD + setting("graph", '"inductor"') + setting("ipex", "true"),
        ", line 7, settings.ipex.value",
        "set one of them",
    ),
    "a mode without torch.compile": (
        HEAD + setting("graph", '"onednn"') + setting("compile_mode", '"max-autotune"'),
        ", line 7, settings.compile_mode.value",
        'graph = "inductor"',
    ),
    "packed weights beside ipex": (
        HEAD + setting("weights", '"fp32"') + setting("ipex", "true"),
        ", line 7, settings.ipex.value",
        "set one of them",
    ),
    "nothing to release": (
        HEAD + setting("release_weights", "true") + setting("optimize", "1"),
        ", line 4, settings.release_weights.value",
        "nothing to release",
    ),
    "a budget without graphs": (
        HEAD + setting("graph_budget", "10") + setting("graph", '"off"') + setting("optimize", "2"),
        ", line 4, settings.graph_budget.value",
        "nothing is captured",
    ),
    "pinned memory without GPUs": (
        'kind = "situation"\nsummary = "s"\n[applies]\ngpus = false\n' + setting("pin_memory", "true"),
        ", line 6, settings.pin_memory.value",
        "needs a GPU",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_an_invalid_profile_is_an_error_with_line_and_key(name):
    text, what, value, place, hint = BROKEN[name]
    with pytest.raises(UsageError) as caught:
        parse_profile(text, name="mine", path="dir/mine.toml")
    error = caught.value
    assert (error.what, error.exit_code) == (what, 2)
    assert str(error.value).startswith(value)
    assert str(error.source) == "dir/mine.toml" + place
    assert hint in str(error.hint)
    assert len(str(error).splitlines()) == 2


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_conflicting_settings_are_an_error(name):
    text, place, why = CONTRADICTIONS[name]
    with pytest.raises(UsageError) as caught:
        parse_profile(text, name="mine", path="mine.toml")
    assert caught.value.what == "conflicting settings in the profile"
    assert caught.value.source == "mine.toml" + place
    assert why in str(caught.value.hint)


def test_combinations_that_do_not_conflict():
    either = "kind = 'situation'\nsummary = 's'\n[[applies]]\nquota = true\n[[applies]]\ngpus = true\n"
    parse_profile(either + setting("wait_policy", '"active"'), name="mine")
    parse_profile(SERVER + setting("mkl_dispatch", '"on"') + setting("openmp", '"intel"'), name="mine")
    parse_profile(HEAD + setting("graph", '"off"') + setting("ipex", "true"), name="mine")
    parse_profile(HEAD + setting("graph", '"inductor"') + setting("compile_mode", '"default"'), name="mine")
    parse_profile(HEAD + setting("optimize", "2") + setting("release_weights", "true"), name="mine")
    parse_profile(HEAD + setting("optimize", "3") + setting("graph_budget", "10.5"), name="mine")
    parse_profile(HEAD + setting("weights", '"int8"') + setting("release_weights", "true"), name="mine")
    parse_profile(HEAD + setting("pin_memory", "true") + setting("dataloader_workers", '"auto"'), name="mine")
    parse_profile(HEAD + setting("binder", '"numactl"') + setting("membind", '"bind"'), name="mine")


def error_of(path):
    with pytest.raises(UsageError) as caught:
        read_profile(str(path))
    place = f" ({caught.value.source})" if caught.value.source else ""
    return f"{caught.value.what}: {caught.value.value}{place}"


def test_files_that_cannot_be_read(tmp_path):
    big = tmp_path / "big.toml"
    big.write_bytes(b'summary = "' + b"x" * 10_000_000)
    binary = tmp_path / "binary.toml"
    binary.write_bytes(b'summary = "s"\nkind = "\xff\xfe\x00"')
    assert error_of(big) == f"cannot read the profile: {big}: larger than {MAX_BYTES // 1024} KiB"
    assert error_of(binary) == f"the profile is not UTF-8 text: byte 22 ({binary}, line 2)"
    assert error_of(tmp_path) == f"cannot read the profile: {tmp_path}: Is a directory"
    assert error_of(tmp_path / "no.toml").startswith(f"cannot read the profile: {tmp_path}/no.toml: No such file")


def test_endless_files_are_not_read(tmp_path):
    fifo = tmp_path / "fifo.toml"
    os.mkfifo(fifo)
    assert not opens(fifo, lambda: error_of(fifo))
    assert "not a regular file" in error_of(fifo)
    link = tmp_path / "zero.toml"
    link.symlink_to("/dev/zero")
    assert "not a regular file" in error_of(link)
    loop = tmp_path / "loop.toml"
    loop.symlink_to(loop)
    assert "cannot read the profile" in error_of(loop)


def test_a_line_that_is_too_long():
    with pytest.raises(UsageError) as caught:
        parse_profile(HEAD + "a" + ".a" * 30_000 + " = 1", name="mine", path="mine.toml")
    assert caught.value.what == "line too long in the profile"
    assert (caught.value.value, caught.value.source) == ("60005 characters", "mine.toml, line 3")


def test_an_unreadable_file(tmp_path):
    if os.geteuid() == 0:
        pytest.skip("root reads every file")
    path = tmp_path / "secret.toml"
    path.write_text(HEAD)
    path.chmod(0)
    assert "Permission denied" in error_of(path)


def test_windows_line_ends_count_as_one_line(tmp_path):
    path = tmp_path / "dos.toml"
    path.write_bytes(HEAD.replace("\n", "\r\n").encode() + b"oops = 1\r\n")
    assert error_of(path) == f"unknown key in the profile: oops ({path}, line 3, oops)"


def test_all_errors_of_a_file_are_found(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text('kind = "sever"\ntypo = 1\n' + "[settings.smt]\nvalue = true\n" + setting("allocator", '"glibc"'))
    assert [error.what for error in profile_errors(str(path))] == [
        "unknown key in the profile",
        "invalid value",
        "settings.smt lacks key 'reason'",
        "invalid value",
    ]
    path.write_text(HEAD + "[settings")
    assert [error.what for error in profile_errors(str(path))] == ["invalid TOML"]
    path.write_text(HEAD + setting("smt", "true"))
    assert profile_errors(str(path)) == ()
    assert [error.what for error in profile_errors(str(tmp_path / "no.toml"))] == ["cannot read the profile"]
