"""A copy that computes in another dtype, and parameters that rest in host memory."""

import copy

import torch
from torch import nn

from tba.trainer.working import Residence, WorkingCopy


def small() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 3, bias=False))
    model.register_buffer("table", torch.tensor([1.0, 1.0 + 2**-20]))
    return model


def test_master_of_the_wanted_dtype_computes_itself():
    master = small()
    assert WorkingCopy(master, torch.float32).model is master


def test_copy_is_cast_but_its_buffers_are_not_and_follows_only_when_refreshed():
    master = small()
    working = WorkingCopy(master, torch.bfloat16)
    assert {p.dtype for p in working.model.parameters()} == {torch.bfloat16}
    assert working.model.table.dtype == torch.float32 and working.model.table[0] != working.model.table[1]
    with torch.no_grad():
        for parameter in master.parameters():
            parameter.add_(1.0)
        master.table.add_(1.0)
    before = [p.clone() for p in working.model.parameters()]
    assert all(not torch.equal(b, p.to(torch.bfloat16)) for b, p in zip(before, master.parameters(), strict=True))
    working.refresh()
    for mine, theirs in zip(working.model.parameters(), master.parameters(), strict=True):
        assert torch.equal(mine, theirs.to(torch.bfloat16))
    assert torch.equal(working.model.table, master.table)


def test_gradients_of_micro_batches_are_summed_in_float32_in_the_masters():
    """256 + 1 is 256 in bf16: a sum kept there would lose every small micro-batch."""
    master = nn.Linear(1, 1, bias=False)
    working = WorkingCopy(master, torch.bfloat16)
    working.collect_gradients()
    for size in (256.0, 1.0, 1.0, 1.0):
        working.model(torch.tensor([[size]], dtype=torch.bfloat16)).sum().backward()
    assert master.weight.grad is not None
    assert master.weight.grad.dtype == torch.float32 and master.weight.grad.item() == 259.0
    assert working.model.weight.grad is None


def test_tied_parameters_stay_tied_and_get_both_gradients():
    tied = nn.ModuleList([nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)])
    tied[1].weight = tied[0].weight
    working = WorkingCopy(tied, torch.bfloat16)
    working.collect_gradients()
    assert working.model[0].weight is working.model[1].weight
    x = torch.ones(1, 2, dtype=torch.bfloat16)
    (working.model[0](x).sum() + working.model[1](x).sum()).backward()
    assert tied[0].weight.grad is not None and tied[0].weight.grad.tolist() == [[2.0, 2.0], [2.0, 2.0]]


def test_offloaded_parameters_are_present_only_while_they_are_used():
    module = small()
    values = copy.deepcopy(module.state_dict())
    residence = Residence(module, torch.device("cpu"))
    residence.offload(True)
    resting = [p.data_ptr() for p in module.parameters()]
    with residence.present():
        assert all(p.data_ptr() not in resting for p in module.parameters())
        with torch.no_grad():
            module[0].weight.zero_()
    assert [p.data_ptr() for p in module.parameters()] == resting
    assert all(torch.equal(v, module.state_dict()[n]) for n, v in values.items()), "a change not announced is dropped"


def test_announced_changes_of_offloaded_parameters_are_kept():
    module = small()
    residence = Residence(module, torch.device("cpu"))
    residence.offload(True)
    with residence.present(changes=True), torch.no_grad():
        module[0].weight.zero_()
    assert not module[0].weight.any()
    residence.offload(False)
    assert not residence.offloaded and not module[0].weight.any() and module[1].weight.any()
