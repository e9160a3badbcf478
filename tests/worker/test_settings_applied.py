"""Each setting takes effect in a real process and prints nothing unexpected."""

import textwrap

import pytest

from cpulaunch.worker.reporting.process_identity import MARK
from tests.worker.applying import case, run_cases

pytestmark = pytest.mark.torch

DATASETS = """
    from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

    class Squares(Dataset):
        def __len__(self):
            return 8
        def __getitem__(self, index):
            return index * index

    class Stream(IterableDataset):
        def __iter__(self):
            return iter(range(4))

    class Mine(DataLoader):
        def __init__(self, dataset, **options):
            super().__init__(dataset, batch_size=4, **options)

    def show(*loaders):
        for name in ("num_workers", "prefetch_factor", "persistent_workers"):
            print(*(getattr(loader, name) for loader in loaders), end=" ")
        print()
"""


def loaders(program, **options):
    return case(textwrap.dedent(DATASETS) + textwrap.dedent(program), **options)


SAVED = """
    import tempfile, warnings
    folder = tempfile.mkdtemp()
    warnings.simplefilter("ignore", FutureWarning)  # torch 2.5 warns of every torch.load.
    path = os.path.join(folder, "weights.pt")
    torch.save({"w": torch.arange(40000.0)}, path)

    def maps():
        return open("/proc/self/maps").read().count("weights.pt")
"""

CHILD = {MARK: "1"}

CASES = {
    # name: (case, what it prints)
    "threads": (case("print(torch.get_num_threads())", threads=1), "1"),
    "more threads than the environment says": (
        case("print(torch.get_num_threads())", before="torch.set_num_threads(1)", threads=2),
        "2",
    ),
    "fewer threads in a child": (
        case("print(torch.get_num_threads())", before="torch.set_num_threads(1)", threads=2, env=CHILD),
        "1",
    ),
    "more threads in a child": (
        case("print(torch.get_num_threads())", before="torch.set_num_threads(2)", threads=1, env=CHILD),
        "1",
    ),
    "interop threads": (case("print(torch.get_num_interop_threads())", interop_threads=3), "3"),
    "precision fp32": (case("print(torch.get_float32_matmul_precision())", precision="fp32"), "highest"),
    "precision tf32": (case("print(torch.get_float32_matmul_precision())", precision="tf32"), "high"),
    "precision medium": (case("print(torch.get_float32_matmul_precision())", precision="medium"), "medium"),
    "denormals kept": (case("print(bool(torch.tensor([1e-310], dtype=torch.double) * 1))"), "True"),
    "denormals flushed": (
        case("print(bool(torch.tensor([1e-310], dtype=torch.double) * 1))", flush_denormal=True),
        "False",
    ),
    "no anomaly detection": (
        case(
            """
            from torch.autograd import detect_anomaly, set_detect_anomaly
            import inspect
            set_detect_anomaly(True)
            with detect_anomaly(check_nan=False) as nothing, set_detect_anomaly(mode=True):
                x = torch.zeros(1, requires_grad=True)
                (x / x).sum().backward()
                print(torch.is_anomaly_enabled(), nothing, *inspect.signature(detect_anomaly).parameters)
            """,
            debug_apis=False,
        ),
        "False None check_nan",
    ),
    "anomaly detection": (
        case(
            """
            with torch.autograd.set_detect_anomaly(True):
                print(torch.is_anomaly_enabled())
            """
        ),
        "True",
    ),
    "no gradcheck": (
        case(
            """
            import inspect
            from torch.autograd.gradcheck import gradcheck, gradgradcheck
            def never(*x):
                raise AssertionError
            x = torch.ones(1, requires_grad=True)
            print(gradcheck(never, x), gradgradcheck(never, x), torch.autograd.gradcheck(never, (x,), eps=1e-3),
                  "eps" in inspect.signature(gradcheck).parameters)
            """,
            debug_apis=False,
        ),
        "True True True True",
    ),
    "no emit_itt": (
        case(
            """
            from torch.autograd.profiler import emit_itt, emit_nvtx
            for context in (emit_itt, emit_nvtx):
                with context(record_shapes=True) as entered, context(enabled=False) as disabled:
                    print(type(entered).__name__, disabled, torch._C._autograd._profiler_enabled(), end=" ")
            try:
                with emit_nvtx():
                    raise KeyError
            except KeyError:
                print("raised")
            """,
            debug_apis=False,
        ),
        "emit_itt None False emit_nvtx None False raised",
    ),
    "interop threads that the program sets to the same number": (
        case("torch.set_num_interop_threads(3); print(torch.get_num_interop_threads())", interop_threads=3),
        "3",
    ),
    "interop threads that the program sets to another number": (
        case("torch.set_num_interop_threads(5); print(torch.get_num_interop_threads())", interop_threads=3),
        "3",
    ),
    "weights mapped": (
        case(
            """
            got = torch.load(path)["w"]
            print(maps() > 0, torch.equal(got, torch.arange(40000.0)))
            got += 1
            print(torch.equal(torch.serialization.load(path)["w"], torch.arange(40000.0)))
            """,
            before=SAVED,
            mmap_weights=True,
        ),
        "True True\nTrue",
    ),
    "weights read": (case("got = torch.load(path); print(maps())", before=SAVED), "0"),
    "weights the program maps or does not": (
        case(
            """
            got = torch.load(path, mmap=False)
            print(maps())
            with open(path, "rb") as file:
                same = torch.load(file)
            print(maps(), len(same["w"]))
            """,
            before=SAVED,
            mmap_weights=True,
        ),
        "0\n0 40000",
    ),
    "weights in the old format": (
        case(
            """
            torch.save({"w": torch.ones(3)}, path, _use_new_zipfile_serialization=False)
            print(torch.load(path)["w"].sum().item(), maps())
            """,
            before=SAVED,
            mmap_weights=True,
        ),
        "3.0 0",
    ),
    "weights that cannot be mapped": (
        case(
            """
            print(torch.load(path)["w"].sum().item() > 0, maps())
            """,
            before=SAVED
            + """
    def broken(*args, **named):
        raise RuntimeError("no mapping today")
    torch.UntypedStorage.from_file = broken
    """,
            mmap_weights=True,
        ),
        "True 0",
    ),
    "a file that is not a checkpoint": (
        case(
            """
            for name, content in (("empty", b""), ("zip", b"PK\\x03\\x04 and then nothing")):
                open(name := os.path.join(folder, name), "wb").write(content)
                try:
                    torch.load(name)
                except Exception as error:
                    print(type(error).__name__)
            try:
                torch.load(os.path.join(folder, "absent"))
            except FileNotFoundError:
                print("absent")
            """,
            before=SAVED,
            mmap_weights=True,
        ),
        "EOFError\nRuntimeError\nabsent",
    ),
    "weights overwritten through a file object": (
        case(
            """
            os.chmod(path, 0o640)
            got = torch.load(path)
            with open(path, "wb") as file:
                torch.save({"w": torch.zeros(1)}, file)
            print(torch.equal(got["w"], torch.arange(40000.0)), torch.load(path)["w"].tolist())
            print(oct(os.stat(path).st_mode & 0o777), len(os.listdir(folder)))
            """,
            before=SAVED,
            mmap_weights=True,
        ),
        "True [0.0]\n0o640 1",
    ),
    "weights saved over themselves": (
        case(
            """
            os.symlink(path, link := os.path.join(folder, "link.pt"))
            got = torch.load(path)
            torch.save({"w": torch.zeros(1)}, link)
            print(torch.equal(got["w"], torch.arange(40000.0)), torch.load(path)["w"].tolist(), os.path.islink(link))
            """,
            before=SAVED,
            mmap_weights=True,
        ),
        "True [0.0] True",
    ),
    "loader workers": (
        loaders(
            """
            show(DataLoader(Squares()), DataLoader(Squares(), 2), Mine(Squares()))
            print(torch.cat(list(DataLoader(Squares(), 3))).tolist())
            """,
            dataloader_workers=2,
        ),
        "2 2 2 2 2 2 False False False\n[0, 1, 4, 9, 16, 25, 36, 49]",
    ),
    "loader workers the program chose": (
        loaders(
            """
            show(DataLoader(Squares(), num_workers=0), DataLoader(Squares(), 1, False, None, None, 1),
                 Mine(Squares(), num_workers=2))
            """,
            dataloader_workers=2,
            prefetch=5,
            persistent_workers=True,
        ),
        "0 1 2 None 5 5 False True True",
    ),
    "prefetch and persistence": (
        loaders(
            """
            show(DataLoader(Squares()), DataLoader(Squares(), num_workers=2),
                 DataLoader(Squares(), num_workers=2, prefetch_factor=7, persistent_workers=False))
            """,
            prefetch=4,
            persistent_workers=True,
        ),
        "0 2 2 None 4 7 False True False",
    ),
    "a stream of samples": (
        loaders(
            """
            loader = DataLoader(Stream())
            show(loader, DataLoader(Stream(), 2), DataLoader(Stream(), num_workers=1))
            print(torch.cat(list(loader)).tolist())
            """,
            dataloader_workers=2,
            prefetch=3,
            persistent_workers=True,
        ),
        "0 0 1 None None 3 False False False\n[0, 1, 2, 3]",
    ),
    "loaders in a daemon": (
        loaders(
            """
            import multiprocessing
            context = multiprocessing.get_context("fork")
            child = context.Process(target=lambda: show(DataLoader(Squares())), daemon=True)
            sys.stdout.flush(); child.start(); child.join(); print(child.exitcode)
            """,
            dataloader_workers=2,
        ),
        "0 None False\n0",
    ),
    "loaders where processes are spawned": (
        loaders(
            """
            import multiprocessing
            multiprocessing.set_start_method("spawn")
            show(DataLoader(Squares()))
            """,
            dataloader_workers=2,
        ),
        "0 None False",
    ),
    "a wrong call of DataLoader": (
        loaders(
            """
            for wrong in (dict(), dict(dataset=Squares(), nonsense=1)):
                try:
                    DataLoader(**wrong)
                except TypeError:
                    print("TypeError")
            """,
            dataloader_workers=2,
        ),
        "TypeError\nTypeError",
    ),
    "applied once": (
        case(
            """
            from cpulaunch.worker.autoload import activate
            load = torch.load
            activate()
            print(load is torch.load)
            """,
            mmap_weights=True,
        ),
        "True",
    ),
}

WARNINGS = {
    "interop threads that the program sets to another number": "--interop-threads set 3",
    "a stream of samples": "--dataloader-workers: an IterableDataset is loaded in the main process",
    "loaders in a daemon": None,
    "loaders where processes are spawned": "--dataloader-workers: processes are spawned here",
    "more threads than the environment says": None,
}
"""The only warning of a case; None: it depends on the machine or is printed by another process."""


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    return run_cases({name: given for name, (given, _) in CASES.items()}, tmp_path_factory.mktemp("cases"))


@pytest.mark.parametrize("name", CASES)
def test_a_setting_takes_effect(outcomes, name):
    outcome = outcomes[name]
    assert outcome.code == 0, outcome.err
    assert [line.strip() for line in outcome.out.splitlines()] == CASES[name][1].splitlines()
    if name not in WARNINGS:
        assert outcome.err == ""
    elif (text := WARNINGS[name]) is not None:
        assert len(outcome.cpulaunch_lines) == 1
        assert text in outcome.cpulaunch_lines[0]
