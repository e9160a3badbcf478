"""The rules of the package's structure, as functions from a package's folder to the violations found there."""

import ast
from collections import Counter, defaultdict
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

MAX_MODULES = 12
MAX_LINES = 400
GENERATED = {"profile.presets"}
TOP_LEVEL = {"__init__", "__main__", "ccl"}

MAY_IMPORT: dict[str, set[str]] = {
    "records": set(),
    "system.files": {"records"},
    "system.tcp": set(),
    "system": {"records", "system.files", "system.tcp"},
    "profile": {"records", "system.files", ""},
    "schedulers": {"records"},
    "probe.software": {"records", "system"},
    "probe.gpus": {"records", "system"},
    "probe": {"records", "system", "probe.software", "probe.gpus"},
    "plan.placement": {"records"},
    "plan.variables": {"records", "plan.placement"},
    "plan.gpus": {"records", "plan.placement", "plan.variables"},
    "plan.ranks": {"records", "plan.placement", "plan.variables", "plan.gpus"},
    "plan.plugin": {"records", "plan.placement", "plan.variables", "plan.ranks"},
    "plan": {"records", "plan.placement", "plan.variables", "plan.gpus", "plan.ranks", "plan.plugin"},
    "launch.process": {"records", "system"},
    "launch.output": {"records", "system", "launch.process"},
    "launch.monitor": {"records", "system", "launch.process"},
    "launch.supervision": {"records", "system", "launch.output", "launch.process", "launch.monitor"},
    "launch.ranks": {"records", "system", "launch.output", "launch.process", "launch.monitor", "launch.supervision"},
    "launch.hosts.agent": {
        *("records", "system", "system.tcp", "launch.process", "launch.ranks", "launch.supervision"),
    },
    "launch.hosts": {
        *("records", "system", "launch.output", "launch.process", "launch.monitor", "launch.supervision"),
        *("launch.ranks", "launch.hosts.agent"),
    },
    "launch": {
        *("records", "system", "launch.output", "launch.process", "launch.monitor", "launch.supervision"),
        *("launch.ranks", "launch.hosts"),
    },
    "worker.tensors": {"records"},
    "worker.reporting": {"records", "system"},
    "worker.process": {"records", "system", "worker.reporting"},
    "worker.fusion.ranges": {"records"},
    "worker.fusion": {"records", "system", "probe", "worker.fusion.ranges", ""},
    "worker.graph": {"records", "worker.reporting", "worker.process", "worker.tensors", "worker.fusion"},
    "worker.weights": {"records", "system", "probe", "worker.reporting", "worker.tensors"},
    "worker.ledger": {"records", "worker.reporting"},
    "worker.features": {
        *("records", "system", "worker.reporting", "worker.tensors", "worker.graph", "worker.weights"),
        "worker.ledger",
    },
    "worker.distributed": {"records"},
    "worker.calibration": {"records", "system"},
    "worker.diagnosis.events": {"records"},
    "worker.diagnosis": {"records", "system", "worker.graph", "worker.diagnosis.events"},
    "worker.ccl.wire": {"records"},
    "worker.ccl.memory": {"records", "system", "worker.ccl.wire"},
    "worker.ccl.oneccl": {"records", "system", "worker.ccl.wire", "worker.ccl.memory"},
    "worker.ccl.works": {"records", "system", "worker.process", "worker.ccl.wire"},
    "worker.ccl": {
        *("records", "system", "worker.reporting", "worker.process"),
        *("worker.ccl.wire", "worker.ccl.memory", "worker.ccl.oneccl", "worker.ccl.works"),
    },
    "worker": {
        *("records", "system", "worker.reporting", "worker.process", "worker.tensors", "worker.graph"),
        *("worker.features", "worker.ccl"),
    },
    "measure": {"records", "system", "probe", "launch.process", "launch.monitor", "launch.output", "view"},
    "measure.tuning": {"records", "system", "measure", "measure.tuning.outputs", "profile"},
    "measure.tuning.outputs": {"system"},
    "measure.tuning.outcome": {"records", "system", "measure", "measure.tuning", "view"},
    "measure.calibration": {
        *("records", "system", "measure", "launch.process", "probe.software", "plan.variables"),
    },
    "measure.diagnosis": {"records", "system", "measure", "launch.process", "view"},
    "measure.diagnosis.changes": {"records", "system", "measure.diagnosis", "view"},
    "view": {"records", "profile"},
    "emit": {"records", "plan"},
    "charts": {"records"},
    "html.elements": {"records", "charts"},
    "html": {"records", "charts", "html.elements"},
    "plots": {"records", "charts"},
    "doctor": {
        *("records", "system", "probe", "probe.software", "probe.gpus"),
        *("plan.placement", "plan.plugin", "view", ""),
    },
    "check.source": {"records"},
    "check.rules.data": {"check", "check.source"},
    "check.rules.model": {"check", "check.source"},
    "check.rules.device": {"check", "check.source"},
    "check.rules.training": {"check", "check.source"},
    "check.rules": set(),
    "check": {"records", "system", "profile", "check.source", "check.rules"},
    "check.output": {"records", "check", "view", ""},
    "cli.corrections": {"records", "system", "launch.process"},
    "cli.help": {"records"},
    "cli.measuring": {
        *("records", "system", "profile", "launch.process", "launch.output", "view"),
        *("measure", "measure.tuning", "measure.tuning.outcome", "measure.tuning.outputs", "measure.diagnosis"),
        "measure.diagnosis.changes",
        *("charts", "html", "plots", "cli.help", ""),
    },
    "cli": {
        *("cli.corrections", "cli.help", "cli.measuring", "measure.calibration"),
        *("records", "system", "profile", "schedulers", "probe", "probe.software", "probe.gpus"),
        *("plan", "plan.gpus", "plan.plugin", "launch", "launch.process", "launch.supervision"),
        *("view", "emit", "html", "doctor", "check.output", ""),
    },
    "on_path": set(),
    "on_path.cpulaunch": set(),
    "__main__": {"cli", "system"},
    "ccl": {"worker.ccl"},
    "": {"worker.reporting"},
}
"""Folder (a module at the top by its name, the package itself as "") -> the other folders it may import from."""

for may_import in MAY_IMPORT.values():
    if "system" in may_import:
        may_import.add("system.files")

EFFECTS = {"os", "subprocess", "socket", "pathlib", "time", "signal", "ctypes", "shutil", "tempfile", "selectors"}
PURE = (
    "check.source",
    "check.rules",
    "check.output",
    "plan",
    "view",
    "emit",
    "charts",
    "html",
    "schedulers",
    "profile.model",
    "launch.supervision.state_machine",
)
"""Folders, with all below them, and modules that decide or format and do nothing else."""

FILES = "system.files"
"""The folder whose modules alone make, change, rename and remove files."""
FILES_ELSEWHERE = {
    "system.control_group": "cgroups, which are folders of the kernel's in which root alone or the user can write",
    "worker.ccl.memory.setup": "memory without a name: a memfd",
}
FILE_CALLS = {
    *("mkdir", "makedirs", "mkfifo", "mknod", "link", "symlink", "rename", "renames", "unlink", "rmdir", "removedirs"),
    *("chmod", "fchmod", "lchmod", "chown", "fchown", "lchown", "truncate", "ftruncate", "mkstemp", "mkdtemp"),
    *("rmtree", "copyfile", "copytree", "write_text", "write_bytes", "touch", "symlink_to", "hardlink_to"),
    *("NamedTemporaryFile", "TemporaryFile", "TemporaryDirectory", "SpooledTemporaryFile"),
}
"""Functions of os, shutil and tempfile, and methods of pathlib's paths."""
QUALIFIED_CALLS = {
    *("os.remove", "os.replace", "os.utime", "os.setxattr", "os.removexattr"),
    *("shutil.move", "shutil.copy", "shutil.copy2"),
}
"""Those whose names other objects' methods have too."""
WRITING_FLAGS = {"O_WRONLY", "O_RDWR", "O_CREAT", "O_TRUNC", "O_APPEND", "O_TMPFILE"}

MAY_IMPORT_TORCH = ("worker", "launch.hosts.agent")
NEVER_IMPORTED = {"numpy"}


class Package:
    """A package's modules, by dotted name below it ("plan.placement.pool"); its folders too."""

    def __init__(self, folder: Path) -> None:
        self.name = folder.name
        self.trees: dict[str, ast.Module] = {}
        self.lines: dict[str, int] = {}
        self.folders: set[str] = set()
        for path in sorted(folder.rglob("*.py")):
            parts = path.relative_to(folder).with_suffix("").parts
            if parts[0] == "profiles":
                continue
            is_folder = parts[-1] == "__init__"
            name = ".".join(parts[:-1] if is_folder else parts)
            if is_folder:
                self.folders.add(name)
            text = path.read_text()
            self.trees[name], self.lines[name] = ast.parse(text), text.count("\n")

    def folder_of(self, module: str) -> str:
        """The folder that a module is in; a folder's `__init__` is in that folder, a module at the top in itself."""
        if module in self.folders:
            return module
        return module.rpartition(".")[0] or module

    def imports(self, module: str) -> Iterator[tuple[str, bool]]:
        """Imported names, and whether each is a module of this package, then by its name below the package.

        Imports inside functions and for type checkers count too.
        """
        for node in ast.walk(self.trees[module]):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    yield self._resolved(alias.name)
            elif isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    whole, is_ours = self._resolved(f"{node.module}.{alias.name}")
                    yield (whole, True) if is_ours and whole in self.trees else self._resolved(str(node.module))

    def _resolved(self, name: str) -> tuple[str, bool]:
        first, _, rest = name.partition(".")
        return (rest, True) if first == self.name else (name, False)

    def own_imports(self, module: str) -> set[str]:
        """Modules of this package that a module imports."""
        return {name for name, is_ours in self.imports(module) if is_ours} - {module}

    def foreign_imports(self, module: str) -> set[str]:
        """First parts of the other modules' names that a module imports."""
        return {name.partition(".")[0] for name, is_ours in self.imports(module) if not is_ours}


def _is_below(name: str, places: tuple[str, ...]) -> bool:
    return any(name == place or name.startswith(place + ".") for place in places)


def upward_imports(package: Package) -> list[str]:
    """Imports that the layer table does not allow."""
    found = []
    for module in package.trees:
        folder = package.folder_of(module)
        for imported in sorted(package.own_imports(module)):
            target = package.folder_of(imported)
            if target != folder and target not in MAY_IMPORT.get(folder, set()):
                found.append(f"{module} imports {imported}: {folder or 'the package'} may not import {target}")
    return found


def cycles(package: Package) -> list[str]:
    """Modules, or folders, that import one another in a circle."""
    folders: defaultdict[str, set[str]] = defaultdict(set)
    for module in package.trees:
        folder = package.folder_of(module)
        folders[folder] |= {package.folder_of(each) for each in package.own_imports(module)} - {folder}
    graphs = {"modules": {module: package.own_imports(module) for module in package.trees}, "folders": folders}
    found = []
    for kind, graph in graphs.items():
        try:
            TopologicalSorter(graph).prepare()
        except CycleError as error:
            found.append(f"{kind}: {' -> '.join(error.args[1])}")
    return found


def crowded_folders(package: Package) -> list[str]:
    """Folders of too many modules, modules loose at the top, and modules of too many lines."""
    inside = Counter(module.rpartition(".")[0] for module in package.trees if module not in package.folders)
    found = [f"{folder}: {count} modules" for folder, count in inside.items() if folder and count > MAX_MODULES]
    loose = {module for module in package.trees if "." not in module and module not in package.folders} - TOP_LEVEL
    found += [f"{module}: loose at the top" for module in sorted(loose)]
    long = {module: lines for module, lines in package.lines.items() if lines > MAX_LINES and module not in GENERATED}
    return found + [f"{module}: {lines} lines" for module, lines in long.items()]


def folders_without_purpose(package: Package) -> list[str]:
    """Folders whose `__init__` is missing or does not say in one sentence what they are for."""
    parents = {module.rpartition(".")[0] for module in package.trees} - {""}
    found = [f"{folder}: no __init__.py" for folder in sorted(parents - package.folders)]
    for folder in sorted(package.folders):
        first = (ast.get_docstring(package.trees[folder]) or "").partition("\n\n")[0]
        if not first.endswith(".") or first.count(". "):
            found.append(f"{folder or 'the package'}: its docstring does not begin with one sentence: {first!r}")
    return found


def impure_imports(package: Package) -> list[str]:
    """Modules that must be pure and import something with effects."""
    return [
        f"{module} imports {name}"
        for module in package.trees
        if _is_below(module, PURE)
        for name in sorted(package.foreign_imports(module) & EFFECTS)
    ]


def torch_imports(package: Package) -> list[str]:
    """Modules that import torch, or what no module may import."""
    return [
        f"{module} imports {name}"
        for module in package.trees
        for name in sorted(package.foreign_imports(module) & (NEVER_IMPORTED | {"torch"}))
        if name != "torch" or not _is_below(module, MAY_IMPORT_TORCH)
    ]


def file_effects(package: Package) -> list[str]:
    """Calls, outside the folder for them, that make, change, rename or remove a file, or open one for writing."""
    return [
        f"{module}, line {node.lineno}: {ast.unparse(node.func)}"
        for module, tree in package.trees.items()
        if not _is_below(module, (FILES, *FILES_ELSEWHERE))
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and _has_file_effect(node)
    ]


def _has_file_effect(call: ast.Call) -> bool:
    name = ast.unparse(call.func)
    last = name.rpartition(".")[2]
    if last in FILE_CALLS or name in QUALIFIED_CALLS:
        return True
    if not call.args or last not in ("open", "fdopen") or _is_no_file(call.args[0]):
        return False
    flags = {node.attr for argument in call.args[1:] for node in ast.walk(argument) if isinstance(node, ast.Attribute)}
    mode = next((word.value for word in call.keywords if word.arg == "mode"), call.args[1] if call.args[1:] else None)
    text = mode.value if isinstance(mode, ast.Constant) else ""
    return bool(flags & WRITING_FLAGS) or (isinstance(text, str) and bool(set(text) & set("wax+")))


def _is_no_file(path: ast.expr) -> bool:
    """Whether a path is that of the null device or of one of /proc's files."""
    first = path.values[0] if isinstance(path, ast.JoinedStr) else path
    if isinstance(first, ast.Constant):
        return str(first.value).startswith("/proc/")
    return ast.unparse(first) == "os.devnull"


def repeated_class_names(package: Package) -> list[str]:
    """Names that more than one class has."""
    places: defaultdict[str, list[str]] = defaultdict(list)
    for module, tree in package.trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(module)
    return [f"{name}: {', '.join(modules)}" for name, modules in sorted(places.items()) if len(modules) > 1]


RULES = (
    upward_imports,
    cycles,
    crowded_folders,
    folders_without_purpose,
    impure_imports,
    torch_imports,
    file_effects,
    repeated_class_names,
)
