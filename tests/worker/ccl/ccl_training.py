"""Checks that training over the backend "ccl" has the losses of training over gloo. Each check runs on all ranks."""

import copy
import shutil
import tempfile
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

CHECKS = {}
STEPS = 5


def check(function):
    CHECKS[function.__name__] = function
    return function


def model():
    torch.manual_seed(7)
    return nn.Sequential(
        nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 1)
    )


def batch(step, seed=0):
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank() + seed)
    return torch.randn(8, 16, generator=generator), torch.randn(8, 1, generator=generator)


def losses(network, optimizer, *, unsynchronized=()):
    """Each step's loss; gradients add up over the steps without synchronization."""
    seen = []
    for step in range(STEPS):
        inputs, targets = batch(step)
        with network.no_sync() if step in unsynchronized else nullcontext():
            loss = nn.functional.mse_loss(network(inputs), targets)
            loss.backward()
        if step not in unsynchronized:
            optimizer.step()
            optimizer.zero_grad()
        seen.append(loss.item())
    return seen


def sgd(network):
    return torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)


def equal(mine, theirs):
    """Asserts equal losses: to the bit with two ranks, as a sum of two has one order; else within rounding errors."""
    tolerance = {"rtol": 0, "atol": 0} if dist.get_world_size() == 2 else {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(torch.tensor(mine), torch.tensor(theirs), **tolerance)


def both(train, gloo):
    equal(train(None), train(gloo))


@check
def data_parallel(gloo):
    def train(group):
        network = DistributedDataParallel(model(), process_group=group, bucket_cap_mb=0.002)
        return losses(network, sgd(network))

    both(train, gloo)


@check
def gradient_accumulation(gloo):
    def train(group):
        network = DistributedDataParallel(model(), process_group=group)
        return losses(network, sgd(network), unsynchronized=(0, 2))

    both(train, gloo)


@check
def communication_hooks(gloo):
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    def compressed(group):
        network = DistributedDataParallel(model(), process_group=group)
        network.register_comm_hook(group, default_hooks.fp16_compress_hook)
        return losses(network, sgd(network))

    def averaged(group):
        network = DistributedDataParallel(model(), process_group=group)
        network.register_comm_hook(group, default_hooks.allreduce_hook)
        return losses(network, sgd(network))

    def low_rank(group):
        network = DistributedDataParallel(model(), process_group=group)
        state = powerSGD_hook.PowerSGDState(group, start_powerSGD_iter=2, min_compression_rate=1)
        network.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        return losses(network, sgd(network))

    # All trainings run first: a rank whose comparison fails earlier would leave the others waiting.
    pairs = [(train(None), train(gloo)) for train in (averaged, compressed, low_rank)]
    equal(*pairs[0])
    for mine, theirs in pairs[1:]:
        torch.testing.assert_close(torch.tensor(mine), torch.tensor(theirs), rtol=2e-2, atol=2e-3)


def gather_from_all_ranks(tensor):
    """The tensors of all ranks, in rank order."""
    found = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(found, tensor.detach().contiguous())
    return found


@check
def join_with_uneven_inputs(gloo):
    network = DistributedDataParallel(nn.Linear(16, 1))
    optimizer = sgd(network)
    with network.join():
        for step in range(2 + dist.get_rank()):
            inputs, targets = batch(step)
            nn.functional.mse_loss(network(inputs), targets).backward()
            optimizer.step()
            optimizer.zero_grad()
    first, *others = gather_from_all_ranks(network.module.weight)
    assert all(torch.equal(first, other) for other in others)


@check
def buffers_are_broadcast_from_rank_zero(gloo):
    network = DistributedDataParallel(model())
    losses(network, sgd(network))
    before = gather_from_all_ranks(network.module[1].running_mean)
    network.eval()
    network(batch(0)[0])  # Broadcasts the buffers but does not change them.
    after = gather_from_all_ranks(network.module[1].running_mean)
    weights = gather_from_all_ranks(network.module[3].weight)
    assert not torch.equal(before[0], before[1])
    assert all(torch.equal(each, before[0]) for each in after)
    assert all(torch.equal(each, weights[0]) for each in weights)


@check
def fully_sharded(gloo):
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

    def train(group, strategy):
        torch.manual_seed(7)
        plain = nn.Sequential(nn.Linear(16, 33), nn.ReLU(), nn.Linear(33, 1))
        network = FullyShardedDataParallel(
            plain, process_group=group, sharding_strategy=strategy, device_id=torch.device("cpu")
        )
        return losses(network, sgd(network))

    torch.manual_seed(7)
    plain = nn.Sequential(nn.Linear(16, 33), nn.ReLU(), nn.Linear(33, 1))
    reference = DistributedDataParallel(plain, process_group=gloo)
    expected = losses(reference, sgd(reference))
    strategies = (ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.NO_SHARD)
    for seen in [train(None, strategy) for strategy in strategies]:
        torch.testing.assert_close(torch.tensor(seen), torch.tensor(expected), rtol=1e-4, atol=1e-5)


@check
def fully_shard_per_parameter(gloo):
    if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 7):
        return  # fully_shard does not support CPUs before torch 2.7, with any backend.
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(7)
    network = nn.Sequential(nn.Linear(16, 33), nn.ReLU(), nn.Linear(33, 1))
    reference = DistributedDataParallel(copy.deepcopy(network), process_group=gloo)
    expected = losses(reference, sgd(reference))
    for part in network:
        if isinstance(part, nn.Linear):
            fully_shard(part, mesh=mesh)
    fully_shard(network, mesh=mesh)
    torch.testing.assert_close(
        torch.tensor(losses(network, sgd(network))), torch.tensor(expected), rtol=1e-4, atol=1e-5
    )


@check
def data_parallel_in_a_subgroup(gloo):
    group = dist.new_group([0, 1])
    if dist.get_rank() > 1:
        return
    network = DistributedDataParallel(model(), process_group=group)
    seen = losses(network, sgd(network))
    assert seen[-1] == seen[-1]
    parts = [torch.empty(32, 16) for _ in range(2)]
    dist.all_gather(parts, network.module[0].weight.detach(), group=group)
    assert torch.equal(*parts)


@check
def checkpoints(gloo):
    import torch.distributed.checkpoint as checkpoint
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folder, 0)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = torch.arange(24.0).view(12, 2)
    network = DistributedDataParallel(model())
    losses(network, sgd(network))
    saved = {"sharded": distribute_tensor(whole, mesh, [Shard(0)]), "model": network.module.state_dict()}
    checkpoint.save(saved, checkpoint_id=folder[0])
    empty = {"sharded": distribute_tensor(torch.zeros(12, 2), mesh, [Shard(0)]), "model": model().state_dict()}
    checkpoint.load(empty, checkpoint_id=folder[0])
    assert torch.equal(empty["sharded"].full_tensor(), whole)
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder[0])
    for name, tensor in network.module.named_parameters():
        assert torch.equal(empty["model"][name], tensor)


@check
def zero_redundancy_optimizer(gloo):
    from torch.distributed.optim import ZeroRedundancyOptimizer

    def train(group, zero):
        network = DistributedDataParallel(model(), process_group=group)
        if not zero:
            return losses(network, torch.optim.Adam(network.parameters(), lr=0.01))
        optimizer = ZeroRedundancyOptimizer(
            network.parameters(), torch.optim.Adam, process_group=group or dist.group.WORLD, lr=0.01
        )
        return losses(network, optimizer)

    equal(train(None, True), train(gloo, False))


@check
def device_meshes_and_tensor_parallel_layers(gloo):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    size = dist.get_world_size()
    if size % 2 == 0:
        mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("data", "model"))
        tensor = torch.ones(1)
        dist.all_reduce(tensor, group=mesh.get_group("data"))
        assert tensor.item() == 2
    mesh = init_device_mesh("cpu", (size,))
    torch.manual_seed(3)
    plain = nn.Sequential(nn.Linear(8, 4 * size), nn.ReLU(), nn.Linear(4 * size, 8))
    inputs = torch.randn(5, 8)
    expected = plain(inputs)
    parallel = parallelize_module(plain, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    torch.testing.assert_close(parallel(inputs), expected)
