"""Stands for cpulaunch in a Python in which it is not installed: imports the real package, from its own folder."""

import sys
from importlib.util import module_from_spec, spec_from_file_location
from os.path import abspath, dirname, join

_folder = dirname(dirname(dirname(abspath(__file__))))
_spec = spec_from_file_location("cpulaunch", join(_folder, "__init__.py"), submodule_search_locations=[_folder])
assert _spec is not None  # For type checkers: it is None for a file of an unknown kind.
assert _spec.loader is not None
sys.modules["cpulaunch"] = _package = module_from_spec(_spec)  # `import cpulaunch` returns what is here at its end.
_spec.loader.exec_module(_package)
