"""GPUs from sysfs files: which exist, which this process may use, and what NVML adds."""

from types import SimpleNamespace

import pytest

from cpulaunch.probe.gpus.nvml import named_gpus, with_nvml
from cpulaunch.probe.gpus.sysfs import MAX_GPUS, MAX_MIG, MIG_CAPABILITIES
from cpulaunch.records.host import Gpu, MigInstance
from tests.plan.gpus.machines import AMD, GIVEN, INTEL, SHAPES, driver_files, gpu, mig
from tests.roots import RootSpec, host_of

PCI = "0000:17:00.0"
WITH_DRIVER = gpu(PCI, 0, "0-3") | driver_files([PCI])


def only(**files: str) -> Gpu | None:
    """The GPU described by these device files; None if the device is not a GPU."""
    named = {name.replace("__", "/"): text for name, text in files.items()}
    found = host_of(RootSpec(files={f"sys/bus/pci/devices/{PCI}/{name}": text for name, text in named.items()})).gpus
    return found[0] if found else None


def test_facts_of_a_gpu() -> None:
    (first,) = host_of(RootSpec(files=WITH_DRIVER)).gpus
    assert (first.model, first.device, first.driver, first.numa_node) == ("NVIDIA H100", 0x2330, "nvidia", 0)
    assert first.uuid == "GPU-00000000-aaaa-bbbb-cccc-0123456789ab"


def test_an_amd_gpu_is_named_by_its_serial_number() -> None:
    found = only(**{"class": "0x120000", "vendor": AMD, "unique_id": "00A1B2C3D4E5F607", "product_name": "MI300X"})
    assert found is not None
    assert (found.uuid, found.model) == ("GPU-00a1b2c3d4e5f607", "MI300X")


@pytest.mark.parametrize(
    ("files", "counts"),
    [
        ({"class": "0x030000", "vendor": AMD, "mem_info_vram_total": str(512 << 20)}, False),
        ({"class": "0x030000", "vendor": AMD, "mem_info_vram_total": str(16 << 30)}, True),
        ({"class": "0x030000", "vendor": AMD}, True),
        ({"class": "0x030200", "vendor": "0x10de", "physfn__class": "0x030200"}, False),
        ({"class": "0x120000", "vendor": INTEL}, False),
        ({"class": "0x030000", "vendor": "0x1a03"}, False),
    ],
    ids=["processor's graphics", "graphics card", "no driver", "virtual function", "other accelerator", "board"],
)
def test_what_counts_as_a_gpu(files: dict[str, str], counts: bool) -> None:
    assert (only(**files) is not None) is counts


@pytest.mark.parametrize(
    ("files", "tiles"),
    [
        ({"tile0__id": "0", "tile1__id": "1"}, 2),
        ({"drm__card0__gt__gt0__id": "0", "drm__card0__gt__gt1__id": "1"}, 2),
        ({"drm__card0__dev": "226:0"}, 1),
    ],
    ids=["xe", "i915", "one"],
)
def test_tiles(files: dict[str, str], tiles: int) -> None:
    found = only(**{"class": "0x038000", "vendor": INTEL}, **files)
    assert found is not None
    assert found.tiles == tiles


def test_a_container_may_use_the_gpus_it_was_given() -> None:
    gpus = host_of(SHAPES["pod-with-two-gpus"]).gpus
    assert [gpu.pci for gpu in gpus if gpu.accessible] == GIVEN


@pytest.mark.parametrize(
    ("nodes", "accessible"),
    [({}, True), ({"dev/nvidiactl": ""}, False), ({"dev/nvidiactl": "", "dev/nvidia0": ""}, True)],
    ids=["driver unused since boot", "not given", "given"],
)
def test_device_files_determine_accessible_gpus(nodes: dict[str, str], accessible: bool) -> None:
    spec = RootSpec(files=WITH_DRIVER | nodes)
    assert [found.accessible for found in host_of(spec).gpus] == [accessible]


@pytest.mark.parametrize(("node", "accessible"), [("renderD128", True), ("renderD129", False)])
def test_render_nodes_determine_accessible_gpus(node: str, accessible: bool) -> None:
    files = gpu(PCI, 0, "0-3", vendor=AMD, **{"drm/renderD128/dev": "226:128"})
    assert [found.accessible for found in host_of(RootSpec(files=files | {f"dev/dri/{node}": ""})).gpus] == [accessible]


def test_mig_devices_are_counted_without_nvml() -> None:
    (found,) = host_of(SHAPES["mig-7"]).gpus
    assert [(each.gpu_instance, each.uuid) for each in found.mig] == [(number, None) for number in range(7, 14)]


def test_of_gpus_and_instances_beyond_those_of_any_machine_nothing_is_read() -> None:
    """Each of a captured machine's may be a link to one folder: their number is squared, and multiplied by GPUs."""
    assert len(host_of(RootSpec(files=WITH_DRIVER | mig(0, MAX_MIG + 9))).gpus[0].mig) == MAX_MIG
    inner = {f"{MIG_CAPABILITIES}/gpu0/mig/gi7/ci{number}/access": "" for number in range(MAX_MIG + 9)}
    assert len(host_of(RootSpec(files=WITH_DRIVER | inner)).gpus[0].mig) == MAX_MIG
    many = [f"{domain:04x}:17:00.0" for domain in range(MAX_GPUS + 9)]
    assert (
        len(host_of(RootSpec(files={name: text for pci in many for name, text in gpu(pci, 0, "0").items()})).gpus)
        == MAX_GPUS
    )


class Nvml:
    """The functions of NVML that the probe calls: one GPU with two MIG devices, or an error."""

    class NVMLError(Exception):
        """The exception class of NVML."""

    def __init__(self, *, refuses: bool = False) -> None:
        self.refuses, self.open = refuses, 0

    def nvmlInit(self) -> None:  # noqa: N802
        if self.refuses:
            raise self.NVMLError
        self.open += 1

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.open -= 1

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return 1

    def nvmlDeviceGetHandleByIndex(self, index: int) -> str:  # noqa: N802
        return f"handle {index}"

    def nvmlDeviceGetPciInfo(self, handle: str) -> SimpleNamespace:  # noqa: N802
        return SimpleNamespace(busId=b"00000000:17:00.0")

    def nvmlDeviceGetUUID(self, handle: str) -> str:  # noqa: N802
        return "GPU-17" if handle == "handle 0" else f"MIG-{handle}"

    def nvmlDeviceGetMigMode(self, handle: str) -> list[int]:  # noqa: N802
        return [1, 1]

    def nvmlDeviceGetMaxMigDeviceCount(self, handle: str) -> int:  # noqa: N802
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle: str, index: int) -> str:  # noqa: N802
        if index > 1:
            raise self.NVMLError
        return str(index)

    def nvmlDeviceGetGpuInstanceId(self, device: str) -> int:  # noqa: N802
        return 9 + int(device)

    def nvmlDeviceGetComputeInstanceId(self, device: str) -> int:  # noqa: N802
        return 0


CUT = Gpu(index=0, vendor="nvidia", pci=PCI, mig=(MigInstance(gpu_instance=9, compute_instance=0),))
OTHER = Gpu(index=1, vendor="amd", pci="0000:af:00.0")


def test_nvml_names_gpus_and_their_mig_devices() -> None:
    nvml = Nvml()
    named, other = named_gpus((CUT, OTHER), nvml)
    assert (named.uuid, [each.uuid for each in named.mig]) == ("GPU-17", ["MIG-0", "MIG-1"])
    assert other == OTHER
    assert nvml.open == 0


def test_an_error_of_nvml_changes_nothing() -> None:
    assert named_gpus((CUT,), Nvml(refuses=True)) == (CUT,)


def test_a_gpu_that_nvml_does_not_list_is_inaccessible() -> None:
    forbidden = Gpu(index=1, vendor="nvidia", pci="0000:af:00.0")
    assert [gpu.accessible for gpu in named_gpus((CUT, forbidden), Nvml())] == [True, False]


def test_nvml_is_not_queried_for_a_captured_machine() -> None:
    host = host_of(RootSpec(files=WITH_DRIVER | mig(0, 2)))
    assert with_nvml(host) is host
