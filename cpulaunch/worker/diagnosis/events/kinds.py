"""What an event of the profiler's is: a region, or an operation of some kind. Pure."""

from __future__ import annotations

from cpulaunch.records.record import record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

PRODUCTS = ("addmm", "mm", "bmm", "baddbmm", "addbmm", "_int_mm", "addmv", "mv", "dot", "matmul", "linear", "conv")
PRODUCT_WORDS = (
    *("convolution", "_scaled_dot_product", "flash_attention", "lstm_layer", "rnn_layer", "conv_transpose"),
    *("pack_mm", "scaled_mm", "grouped_mm", "sparse_mm", "sparse_addmm", "int_mm", "addmm_activation"),
)
PRODUCT_ENDS = ("_linear", "_linear_pointwise", "_linear_dynamic")
PRODUCT_PREFIXES = (
    *("quantized::linear", "quantized::conv", "onednn::", "mkldnn::", "mkldnn_prepacked::", "mkl::", "LLGA_bridge::"),
)
COMPUTING_PREFIXES = (
    *("linalg_", "_linalg_", "fft_", "_fft", "special_", "_special_", "cdist", "_cdist", "_ctc_loss", "_unique"),
    *("unique_", "cholesky", "_cholesky", "lu_", "triangular_", "grid_sampler", "_pdist", "igamma", "histogram"),
)
COMPUTING = (
    *("sort", "argsort", "msort", "topk", "kthvalue", "median", "nanmedian", "mode", "searchsorted", "bucketize"),
    *("svd", "qr", "geqrf", "ormqr", "inverse", "histc", "bincount", "lgamma", "digamma", "polygamma", "erfinv"),
    *("multinomial", "normal_", "normal", "uniform_", "random_", "bernoulli_", "bernoulli", "exponential_", "poisson"),
    *("cauchy_", "log_normal_", "geometric_", "rand", "randn", "randint", "randperm", "rand_like", "randn_like"),
)
"""Operations that are no products, and do more for each byte than move it: decompositions, sorting, random numbers."""
MOVING_FAMILIES = ("aten", "quantized", "prims")
"""Whose other operations move data. What those of extensions do is not known."""
COMPILED = "## Call CompiledFxGraph"
"""How the regions of graphs begin that torch.compile's inductor has compiled: their kernels have no events."""
ALLOCATIONS = ("empty", "empty_like", "empty_strided", "resize_", "new_empty", "new_empty_strided")
SYNCHRONIZATIONS = ("item", "_local_scalar_dense", "is_nonzero", "tolist")
"""Reads of single numbers. Those of whole tensors, as nonzero and equal, cost what they read."""
ACCESSES = ("select", "slice", "narrow", "index", "index_select", "take", "unbind", "select_backward", "slice_backward")
LOW_TYPES = ("c10::BFloat16", "c10::Half", "BFloat16", "Half")
REGIONS = ("cpulaunch::", "Optimizer.")
BACKENDS = ("gloo:", "mpi:", "ccl:", "nccl:", "ucc:", "xccl:")
"""How the names of events begin in which a backend runs a collective."""
CONTAINERS = ("autograd::engine::", "Torch-Compiled Region", "DistributedDataParallel", "DataParallel", "enumerate(")


@record
class Event:
    """One event of the profiler's on the measured thread. Times in ns; `shapes` and `types` of its inputs."""

    name: str
    start: int
    end: int
    flops: float = 0.0
    shapes: Sequence[Sequence[int]] = ()
    types: Sequence[str] = ()


def is_container(event: Event) -> bool:
    """Whether this is no operation but a node, a module or a region around operations, as a program may name one."""
    name = event.name
    return name.startswith(CONTAINERS) or ("::" not in name and not name.startswith((*BACKENDS, COMPILED)))


def kind_of(event: Event) -> str:
    """products, low products, allocation, synchronization, access, collective, computing, or other (moving data).

    computing: compiled graphs, and operations that compute more than they move or that are not known.
    """
    family, _, name = event.name.rpartition("::")
    if family in ("c10d", "_c10d_functional") or event.name.startswith(BACKENDS):
        return "collective"
    if event.name.startswith(COMPILED):
        return "computing"
    if name in SYNCHRONIZATIONS:
        return "synchronization"
    if _is_product(event.name, name):
        return "low products" if any(each in LOW_TYPES for each in event.types) else "products"
    if name in ALLOCATIONS:
        return "allocation"
    if name in ACCESSES:
        return "access"
    is_torchs = family in MOVING_FAMILIES or family.startswith(("torch::", "torch."))
    is_moving = is_torchs and name not in COMPUTING and not name.startswith(COMPUTING_PREFIXES)
    return "other" if is_moving else "computing"


def low_type(event: Event) -> str:
    """The type of a product of low precision: fp16 or bf16."""
    return "fp16" if any(each.endswith("Half") for each in event.types) else "bf16"


def _is_product(whole: str, name: str) -> bool:
    return (
        name in PRODUCTS
        or name.endswith(PRODUCT_ENDS)
        or any(word in name for word in PRODUCT_WORDS)
        or whole.startswith(PRODUCT_PREFIXES)
    )
