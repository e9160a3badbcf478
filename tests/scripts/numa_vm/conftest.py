import pytest


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Parallel runs start with the virtual machines: they take longest."""
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: item.path.parent.name != "numa_vm")
