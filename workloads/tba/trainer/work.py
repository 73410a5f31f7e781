"""How much work the trainer's model does in a step: FLOPs of the reference, forward and backward pass."""

from tba.flops import model_shape, peak_flops
from tba.gpus import gpu_model
from tba.trainer.learner import Learner, StepResult

_TRAINING, _TRAINING_ADAPTER = 3.0, 2.0
"""Forward and backward, in forward passes; with frozen weights, whose gradients nobody computes."""


class StepWork:
    """Of one learner's steps."""

    def __init__(self, learner: Learner) -> None:
        self._learner = learner
        self._training = _TRAINING if learner.config.model.lora is None else _TRAINING_ADAPTER
        model = learner.policy.model
        tensors = ((name, tuple(tensor.shape)) for name, tensor in model.named_parameters())
        self._shape = model_shape(model.config.to_dict(), tensors)  # type: ignore[union-attr, operator]
        on_gpu = learner.policy.device.type == "cuda"
        peak = peak_flops(gpu_model(), learner.config.model.dtype) if on_gpu else None
        self.peak_flops = peak and peak * learner.num_ranks
        """What the GPUs could do a second; None: not known, or there is none."""

    def flops(self, result: StepResult) -> float | None:
        """None if the model is no dense decoder.

        The least that the batch needs: each distinct row once, its last token not fed in, a prompt once for its group.
        Where prompts were repeated, their matrices count each time. Rows that the reference scored are taken to be like
        those of the batch on average: which they were is not told.
        """
        if self._shape is None:
            return None
        buffer, plan = self._learner.buffer, result.plan
        least, tokens = 0.0, 0
        for prompt_id, rows, weights in zip(plan.prompt_ids, plan.rows, plan.weights, strict=True):
            prompt = len(buffer.prompt_tokens(int(prompt_id)))
            lengths = buffer.num_tokens(rows[weights > 0]).tolist()
            least += self._shape.forward(prompt, 0) + sum(self._shape.generate(prompt, n) for n in lengths)
            tokens += prompt + sum(n - 1 for n in lengths)
        repeated = max(result.trained_tokens - tokens, 0)
        training = self._training * (least + 2.0 * self._shape.matrix_parameters * repeated)
        return training + least * result.scored_tokens / max(tokens, 1)
