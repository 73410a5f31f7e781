"""What of the live policy is published."""

import torch
from support.learning import make_learner, run_config, tiny_llama

from tba.contracts.config import Model
from tba.trainer.model import Policy


def test_parameters_are_published_in_the_weights_dtype_and_buffers_in_their_own():
    config = run_config()
    model = tiny_llama()
    model.register_buffer("table", torch.tensor([1.0, 1.0 + 2**-20]))
    model.register_buffer("counts", torch.tensor([3]))
    objective = config.objective
    policy = Policy(
        model,
        config=Model(**{**config.model.model_dump(), "dtype": "bfloat16"}),
        reference=objective.reference,
        temperature=objective.temperature,
    )
    staged = policy.stage()
    assert staged["table"].tolist() == [1.0, 1.0 + 2**-20], "a cast would have made them equal"
    assert staged["counts"].dtype == torch.int64
    assert {t.dtype for n, t in staged.items() if n not in ("table", "counts")} == {torch.bfloat16}


def test_staged_tensors_do_not_follow_the_live_policy():
    policy = make_learner().policy
    policy.model.register_buffer("table", torch.ones(2))
    staged = policy.stage()
    before = {n: t.clone() for n, t in staged.items()}
    with torch.no_grad():
        for tensor in (*policy.model.parameters(), policy.model.table):
            tensor.add_(1.0)
    assert all(torch.equal(staged[n], before[n]) for n in before)
