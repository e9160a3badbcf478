"""The backend "ccl" of torch.distributed, for CPU tensors.

An all_reduce takes this way: `backend.CclGroup` checks its arguments and turns the call into a job; `executor` runs the
group's jobs in order, in the calling thread or its own, and returns a `work`; `wire.collectives` flattens the tensors
and packs the call that ranks compare; `memory.path` moves the data between ranks of one host, `oneccl.path` otherwise.
`registration` makes torch know the backend, and `group_setup` chooses the path when a group is created.
"""
