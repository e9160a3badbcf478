"""The command diagnose: its command line, its exit codes, and programs that cannot be diagnosed."""

import json
import os
import signal
import subprocess
import sys
import textwrap

import pytest

from cpulaunch.cli.measuring import diagnose as command
from cpulaunch.cli.measuring.diagnose_arguments import asks_for_json, parse_diagnose
from cpulaunch.measure.diagnosis import folder
from cpulaunch.records.errors import UsageError
from tests import json_output
from tests.html.reader import Reader
from tests.launch.launching import alive, eventually

TRAIN = """
    import torch
    from torch import nn

    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number in range(STEPS):
        optimizer.zero_grad()
        model(torch.rand(16, 64)).square().mean().backward()
        optimizer.step()
    open("finished", "w").close()
"""


def test_own_options_come_before_those_of_the_launch():
    line = parse_diagnose(["--steps", "7", "--json", "--trace=t.json", "--nproc-per-node", "2", "a.py", "--json"])
    assert (line.steps, line.json, line.trace, line.html) == (7, True, "t.json", None)
    assert line.launch == ("--nproc-per-node", "2", "a.py", "--json")


def test_two_files_are_compared():
    line = parse_diagnose(["--json", "--compare", "a.json", "b.json"])
    assert (line.compared, line.json, line.launch) == (("a.json", "b.json"), True, ())
    assert parse_diagnose(["--html=p.html", "a.py"]).html == "p.html"


WRONG = {
    "": "no script given",
    "--steps x a.py": "invalid value 'x' for --steps",
    "--steps 1 a.py": "invalid value",
    "--budget inf a.py": "invalid value",
    "--trace": "--trace needs a value",
    "--json=1 a.py": "--json takes no value",
    "--compare a.json": "--compare needs two files",
    "--compare a.json b.json c.json": "--compare needs two files",
    "--compare a.json --steps 5 b.json": "--compare launches nothing, and takes no --steps",
}


@pytest.mark.parametrize("words", WRONG)
def test_a_wrong_command_line_is_a_usage_error(words):
    with pytest.raises(UsageError) as error:
        parse_diagnose(words.split())
    assert WRONG[words] in str(error.value)


def test_json_is_asked_for_by_its_own_option_only():
    assert asks_for_json(["--steps", "3", "--json", "a.py"])
    assert not asks_for_json(["--steps", "3", "a.py", "--json"])


@pytest.fixture
def diagnose(tmp_path):
    """A function that runs `cpulaunch diagnose` on a program's text."""

    def run(*words, code, environ=None):
        (tmp_path / "program.py").write_text(textwrap.dedent(code))
        command = [sys.executable, "-m", "cpulaunch", "diagnose", *words, "program.py"]
        environ = {**os.environ, **(environ or {})}
        return subprocess.run(
            command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=240, check=False
        )

    return run


@pytest.mark.slow
@pytest.mark.parametrize("words", [(), ("--defaults",), ("--instances", "2", "--oversubscribe", "--verbose")], ids=str)
def test_the_program_ends_when_its_steps_have_been_measured(diagnose, tmp_path, words):
    ran = diagnose("--json", *words, code=TRAIN.replace("STEPS", "10**9"))
    data = json_output.read("diagnose", ran.stdout)
    assert ran.returncode == 0
    assert len(data["processes"]) == (2 if "2" in words else 1)
    assert {process["step"] for process in data["processes"]} == {"optimizer"}
    assert not (tmp_path / "finished").exists()


def test_ranks_are_measured_together(diagnose):
    code = """
        import torch
        from torch import distributed, nn
        from torch.nn.parallel import DistributedDataParallel

        distributed.init_process_group("gloo")
        model = DistributedDataParallel(nn.Linear(64, 64))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        while True:
            optimizer.zero_grad()
            model(torch.rand(16, 64)).square().mean().backward()
            optimizer.step()
    """
    ran = diagnose("--json", "--nproc-per-node", "2", code=code)
    data = json_output.read("diagnose", ran.stdout)
    assert [process["rank"] for process in data["processes"]] == [0, 1]


def test_a_short_program_is_diagnosed_by_the_steps_there_are(diagnose, tmp_path):
    ran = diagnose("--json", code=TRAIN.replace("STEPS", "12"))
    data = json_output.read("diagnose", ran.stdout)
    assert (ran.returncode, (tmp_path / "finished").exists()) == (0, True)
    assert 1 <= data["processes"][0]["steps"] < 10


def test_to_the_end(diagnose, tmp_path):
    ran = diagnose("--to-end", "--steps", "4", code=TRAIN.replace("STEPS", "1000"))
    assert ran.returncode == 0
    assert (tmp_path / "finished").exists()
    assert "steps were measured, each ends with an optimizer's step" in ran.stdout


def test_a_program_without_steps_has_no_diagnosis(diagnose):
    ran = diagnose(code="import torch")
    assert (ran.returncode, ran.stdout) == (1, "")
    assert "could not be diagnosed: no step was seen: outside the functions" in ran.stderr


def test_a_program_without_steps_is_an_error_in_json_too(diagnose):
    ran = diagnose("--json", code="import torch")
    error = json_output.read_messages(ran.stderr)[-1]
    assert (ran.returncode, ran.stdout, error["level"], error["exit_code"]) == (1, "", "error", 1)
    assert "no step was seen" in error["message"]


def test_a_program_that_fails_is_named_with_its_message(diagnose):
    ran = diagnose(code="raise ValueError('bad shape')")
    assert ran.returncode == 1
    assert "could not be diagnosed: it exited with code 1: ValueError: bad shape" in ran.stderr


def test_a_program_that_fails_after_a_few_steps_is_named_with_its_message(diagnose):
    ran = diagnose(code=f"{TRAIN.replace('STEPS', '4')}    raise ValueError('bad data')")
    assert (ran.returncode, ran.stdout) == (1, "")
    assert "could not be diagnosed: it exited with code 1: ValueError: bad data" in ran.stderr


def test_a_failure_is_json_too(diagnose):
    ran = diagnose("--json", code="raise ValueError('bad shape')")
    error = json.loads(ran.stderr.splitlines()[-1])
    assert (ran.returncode, ran.stdout, error["level"], error["exit_code"]) == (1, "", "error", 1)
    assert "ValueError: bad shape" in error["message"]


def test_a_program_that_fails_after_its_steps_is_diagnosed(diagnose):
    ran = diagnose("--json", "--to-end", code=f"{TRAIN.replace('STEPS', '20')}    raise ValueError('bad data')")
    data = json_output.read("diagnose", ran.stdout)
    assert (ran.returncode, len(data["processes"])) == (0, 1)
    assert (
        data["remarks"][0]
        == "the program did not end well after these steps: it exited with code 1: ValueError: bad data"
    )


def test_too_few_steps_are_said(diagnose):
    ran = diagnose(code=TRAIN.replace("STEPS", "6"))
    assert (ran.returncode, "too few steps: 6 were seen, and 8 are needed" in ran.stderr) == (1, True)


def test_why_there_is_no_step(diagnose):
    assert "no process loaded torch" in diagnose(code="print()").stderr
    assert "too few steps: 3 were seen" in diagnose(code=THREAD.replace("CALLS", "6")).stderr


THREAD = """
    import threading, torch
    module = torch.nn.Linear(2, 2)
    thread = threading.Thread(target=lambda: [module(torch.rand(1, 2)) for _ in range(CALLS)])
    thread.start()
    thread.join()
"""


def test_a_thread_that_serves_requests_is_measured(diagnose):
    data = json_output.read("diagnose", diagnose("--json", code=THREAD.replace("CALLS", "10**9")).stdout)
    assert data["first"]["kind"] in ("tiny-operations", "python-code")
    assert data["processes"][0]["profiled_steps"] >= 1


POOL = """
    import multiprocessing
    import torch

    torch.set_num_threads(1)
    module = torch.nn.Linear(64, 64)

    def infer(number):
        with torch.no_grad():
            return float(module(torch.full((64, 64), float(number))).sum())

    if __name__ == "__main__":
        with multiprocessing.get_context("fork").Pool(2) as pool:
            pool.map(infer, range(10**8), chunksize=100)
"""


def test_processes_that_others_wait_for_are_measured_to_the_end(diagnose):
    for _ in range(3):  # Other tests that run meanwhile may hold one of them up for too long.
        ran = diagnose("--json", "--budget", "120", code=POOL)
        data = json_output.read("diagnose", ran.stdout)
        assert ran.returncode == 0
        if len(data["processes"]) == 2:
            break
    assert len(data["processes"]) == 2, data["remarks"]
    assert not any("still running" in remark for remark in data["remarks"])


TRANSFORMS = """
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, Dataset

    class Samples(Dataset):
        transform = nn.Sequential(nn.ReLU())

        def __len__(self):
            return 10**8

        def __getitem__(self, number):
            return self.transform(torch.rand(64))

    if __name__ == "__main__":
        model = nn.Linear(64, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for batch in DataLoader(Samples(), batch_size=16, num_workers=1):
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
"""


def test_modules_in_loader_workers_make_no_steps(diagnose):
    data = json_output.read("diagnose", diagnose("--json", "--budget", "120", code=TRANSFORMS).stdout)
    assert [process["step"] for process in data["processes"]] == ["optimizer"]


def test_a_trace_that_cannot_be_written_is_refused_before_the_program_runs(diagnose, tmp_path):
    ran = diagnose("--trace", "missing/trace.json", code="open('launched', 'w')")
    assert (ran.returncode, "cannot be written" in ran.stderr) == (125, True)
    assert not (tmp_path / "launched").exists()


PROFILED = """
    import torch
    from torch import nn
    from torch.profiler import ProfilerActivity, profile, schedule

    model = nn.Linear(64, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    cycles = schedule(wait=WAIT, warmup=2, active=3, repeat=REPEAT)
    with profile(activities=[ProfilerActivity.CPU], schedule=cycles) as profiler:
        for _ in range(2000):
            optimizer.zero_grad()
            model(torch.rand(16, 64)).square().mean().backward()
            optimizer.step()
            profiler.step()
    open("finished", "w").close()
"""


@pytest.mark.parametrize(("wait", "repeat"), [("0", "1"), ("7", "0")])
def test_a_profiler_of_the_programs_own_is_left_alone(diagnose, tmp_path, wait, repeat):
    code = PROFILED.replace("WAIT", wait).replace("REPEAT", repeat)
    ran = diagnose("--json", "--to-end", "--steps", "4", code=code)
    data = json_output.read("diagnose", ran.stdout)
    assert (ran.returncode, (tmp_path / "finished").exists()) == (0, True)
    assert not any("did not end well" in remark for remark in data["remarks"])


def test_the_page_and_a_trace_that_viewers_read_are_written_beside_the_text(diagnose, tmp_path):
    words = ("--html", "page.html", "--trace", "trace.json", "--steps", "4")
    ran = diagnose(*words, code=TRAIN.replace("STEPS", "10**9"))
    page = (tmp_path / "page.html").read_text()
    assert ran.returncode == 0
    assert "page: page.html" in ran.stderr
    assert "steps were measured" in ran.stdout
    assert Reader(page).text.strip().startswith("cpulaunch diagnose: program.py")
    assert "aten::" in page
    names = {event.get("name") for event in json.loads((tmp_path / "trace.json").read_text())["traceEvents"]}
    assert {"aten::addmm", "cpulaunch::module", "cpulaunch::backward"} <= names


def test_a_trace_that_is_too_large_is_not_written_in_part(tmp_path, monkeypatch):
    monkeypatch.setattr(folder, "MAX_TRACE_BYTES", 8)
    monkeypatch.setattr(command, "MAX_TRACE_BYTES", 8)
    path = tmp_path / "trace.json"
    for size in (8, 9):
        (tmp_path / f"{folder.TRACES}7.json").write_bytes(b"x" * size)
        error = command._trace_error(str(path), folder.read_trace(str(tmp_path), 7), direct=None)
        assert (error is None, path.exists()) == (size == 8, size == 8)
        path.unlink(missing_ok=True)


def test_a_page_that_cannot_be_written_is_refused_before_the_program_runs(diagnose, tmp_path):
    ran = diagnose("--html", "missing/page.html", code="open('launched', 'w')")
    assert (ran.returncode, "cannot be written" in ran.stderr) == (125, True)
    assert not (tmp_path / "launched").exists()


def test_pipes_that_the_program_puts_in_place_of_the_page_and_the_trace_are_replaced(diagnose, tmp_path):
    """Else the diagnosis would wait for a reader, for ever."""
    pipes = "import os\nfor name in ('page.html', 'trace.json'):\n    os.mkfifo(name)\n"
    ran = diagnose(
        "--html", "page.html", "--trace", "trace.json", "--steps", "4", code=pipes + TRAIN.replace("STEPS", "10**9")
    )
    assert ran.returncode == 0
    assert (tmp_path / "page.html").is_file()
    assert (tmp_path / "trace.json").is_file()


def test_two_diagnoses_are_compared(diagnose, tmp_path):
    slow = TRAIN.replace("    optimizer.zero_grad()", "    __import__('time').sleep(0.02); optimizer.zero_grad()")
    for name, code in (("before", slow), ("after", TRAIN)):
        ran = diagnose("--json", "--steps", "4", code=code.replace("STEPS", "10**9"))
        (tmp_path / f"{name}.json").write_text(ran.stdout)
    command = [sys.executable, "-m", "cpulaunch", "diagnose", "--compare", "before.json"]
    text = subprocess.run([*command, "after.json"], cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    assert text.startswith("steps are ")
    assert "waiting outside torch shrank by" in text.replace("\n", " ")
    command.insert(4, "--json")
    ran = subprocess.run([*command, "after.json"], cwd=tmp_path, capture_output=True, text=True, check=True)
    found = json_output.read("diagnose-compare", ran.stdout)
    assert found["speedup"] > 2
    assert found["parts"][0]["name"] == "waiting"
    assert found["before"]["first"]["name"] == "waiting outside torch"


def test_a_file_that_is_no_diagnosis_is_named(tmp_path):
    (tmp_path / "wrong.json").write_text("{}")
    command = [sys.executable, "-m", "cpulaunch", "diagnose", "--compare", "wrong.json", "missing.json"]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stdout) == (125, "")
    assert "no diagnosis can be read: wrong.json" in ran.stderr


CHANGING = {
    "a compiled module": """
        import torch
        from torch import nn

        model = torch.compile(nn.Sequential(nn.Linear(64, 64), nn.ReLU()), backend="aot_eager", fullgraph=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        while True:
            optimizer.zero_grad()
            model(torch.rand(16, 64)).square().mean().backward()
            optimizer.step()
    """,
    "several models": """
        import torch
        from torch import nn

        models = nn.Linear(8, 8), nn.Linear(8, 1)
        optimizers = [torch.optim.Adam(model.parameters()) for model in models]
        while True:
            made = models[0](torch.rand(16, 8))
            for optimizer, loss in zip(optimizers, (models[1](made).mean(), models[1](made.detach()).square().mean())):
                optimizer.zero_grad()
                loss.backward(retain_graph=True)
            for optimizer in optimizers:
                optimizer.step()
    """,
    "steps in a generator": """
        import torch
        from torch import nn

        model = nn.Linear(64, 64)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def losses():
            while True:
                optimizer.zero_grad()
                loss = model(torch.rand(16, 64)).square().mean()
                loss.backward()
                optimizer.step()
                yield loss.detach()

        for _ in losses():
            pass
    """,
    "exceptions that are caught": """
        import torch
        from torch import nn

        class Sometimes(nn.Module):
            def __init__(self):
                super().__init__()
                self.inner, self.count = nn.Linear(64, 64), 0

            def forward(self, x):
                self.count += 1
                if self.count % 3 == 0:
                    raise ValueError("a bad sample")
                return self.inner(x)

        model = Sometimes()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        while True:
            optimizer.zero_grad()
            try:
                model(torch.rand(16, 64)).square().mean().backward()
            except ValueError:
                continue
            optimizer.step()
    """,
    "an evaluation before the training": """
        import torch
        from torch import nn

        model = nn.Linear(64, 64)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with torch.no_grad():
            for _ in range(12):
                model(torch.rand(16, 64))
        while True:
            optimizer.zero_grad()
            model(torch.rand(16, 64)).square().mean().backward()
            optimizer.step()
    """,
}


@pytest.mark.parametrize("name", CHANGING)
def test_programs_of_many_kinds_are_measured(diagnose, name):
    ran = diagnose("--json", "--budget", "120", code=CHANGING[name])
    assert ran.returncode == 0, ran.stderr
    (process,) = json_output.read("diagnose", ran.stdout)["processes"]
    assert process["step"] == "optimizer"
    assert process["profiled_steps"] >= 1
    assert process["shares"]["unknown"] < 0.01


RESULTS = """
    import sys
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    torch.manual_seed(3)
    data = TensorDataset(torch.rand(256, 8), torch.rand(256, 1))
    model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.1), nn.Linear(16, 1))
    optimizer = torch.optim.Adam(model.parameters())
    for epoch in range(5):
        loader = DataLoader(data, batch_size=16, shuffle=True, num_workers=1, multiprocessing_context="fork")
        for inputs, targets in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(inputs), targets).backward()
            optimizer.step()
    with open(NAME, "w") as file:
        file.write(repr([weight.double().sum().item() for weight in model.parameters()]))
    sys.exit(7)
"""


def test_a_diagnosed_program_computes_what_it_does_alone(diagnose, tmp_path):
    ran = diagnose("--json", "--to-end", "--steps", "4", code=RESULTS.replace("NAME", "'diagnosed'"))
    found = json_output.read("diagnose", ran.stdout)
    assert "it exited with code 7" in found["remarks"][0]
    (tmp_path / "alone.py").write_text(textwrap.dedent(RESULTS.replace("NAME", "'alone'")))
    assert subprocess.run([sys.executable, "alone.py"], cwd=tmp_path, timeout=240, check=False).returncode == 7
    assert (tmp_path / "diagnosed").read_text() == (tmp_path / "alone").read_text()


@pytest.mark.parametrize("word", ["--dry-run", "--emit=sh"])
def test_options_that_start_nothing_are_refused(diagnose, word):
    ran = diagnose(word, code="open('launched', 'w')")
    assert (ran.returncode, "starts nothing" in ran.stderr) == (2, True)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_signal_ends_it_and_what_it_launched(tmp_path, number):
    code = "import os, time; open(f'pid-{os.getpid()}', 'w').close(); time.sleep(1000)"
    (tmp_path / "program.py").write_text(code)
    (tmp_path / "tmp").mkdir()
    process = subprocess.Popen(
        [sys.executable, "-m", "cpulaunch", "diagnose", "program.py"],
        cwd=tmp_path,
        env={**os.environ, "TMPDIR": str(tmp_path / "tmp")},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    pids = eventually(lambda: [int(path.name[4:]) for path in tmp_path.glob("pid-*")], "the launch")
    process.send_signal(number)
    process.communicate(timeout=60)
    eventually(lambda: not any(alive(pid) for pid in pids), "the end of the launch")
    eventually(lambda: not os.listdir(tmp_path / "tmp"), "the removal of its files")
