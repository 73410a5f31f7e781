"""What a run would meet in its first minute, met by `tba run --dry-run`: the trainer's own code, up to the weights.

model directory ─► configuration, tokenizer, model without weights ─► LoRA targets
prompt files    ─► as many usable prompts as a batch takes
"""

import os
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from tba.cli.local_plan import Plan
from tba.cli.target import open_address
from tba.contracts.config import Prompts, RunConfig
from tba.contracts.errors import StoreUnavailable, UserError
from tba.lora import targets_of
from tba.models import HubUnreachable, outline_model
from tba.prompts import usable_prompts
from tba.prompts.sources import name_of, object_bytes
from tba.store.protocol import ObjectStore
from tba.trainer.fork import outline_fork
from tba.trainer.startup import refuse_few_prompts

_CHEAP_BYTES = 64 << 20
"""An object of prompts up to this size is read here too."""


@dataclass(slots=True)
class Findings:
    """What was looked at, and what was not and why; in words."""

    checked: list[str] = field(default_factory=list)
    not_checked: list[str] = field(default_factory=list)

    def describe(self) -> str:
        """For people, below the plan's own description."""
        lines = [f"  checked    {what}" for what in self.checked]
        return "\n".join(lines + [f"  unchecked  {what}" for what in self.not_checked])

    def to_dict(self) -> dict[str, list[str]]:
        """For `--json`."""
        return {"checked": self.checked, "notChecked": self.not_checked}


def check_inputs(planned: Plan) -> Findings:
    """Raises: UserError for a model or prompts that the trainer would refuse.

    What this machine cannot reach is no error: a job may be checked elsewhere than it runs.
    """
    return _Check(planned).run()


class _Check:
    def __init__(self, planned: Plan) -> None:
        self._plan = planned
        self._config: RunConfig = planned.job.spec.run_config()
        self._found = Findings()

    def run(self) -> Findings:
        prompts = {"task.prompts": self._config.task.prompts}
        if self._config.task.evaluation.prompts is not None:
            prompts["task.evaluation.prompts"] = self._config.task.evaluation.prompts
        try:
            model, tokenizer = self._outline()
        except (HubUnreachable, StoreUnavailable) as error:
            self._skip("model", str(error))
            for name in prompts:
                self._skip(name, "no tokenizer without the model")
            return self._found
        lora = self._config.model.lora
        if lora is not None:
            targets_of(model, lora)
        self._found.checked.append(
            f"{self._model_source()}: configuration and tokenizer{', LoRA targets' if lora else ''}"
        )
        self._skip("weights", "the run reads them")
        for name, given in prompts.items():
            self._check_prompts(name, given, tokenizer)
        return self._found

    def _model_source(self) -> str:
        fork = self._config.fork_from
        return f"forkFrom {fork.uri}" if fork else f"model.uri {self._config.model.uri}"

    def _outline(self) -> tuple[nn.Module, Any]:
        fork = self._config.fork_from
        if fork is not None:
            with closing(self._open_store(fork.uri)) as store:
                return outline_fork(store, fork, self._config.model)
        return outline_model(
            self._config.model,
            base_dir=self._plan.job_file.parent,
            token=os.environ.get("HF_TOKEN"),
            open_store=self._open_store,
        )

    def _check_prompts(self, name: str, prompts: Prompts, tokenizer: Any) -> None:
        config, uri = self._config, prompts.uri or ""
        training = prompts is config.task.prompts
        wanted = config.objective.prompts_per_batch if training else 1
        if uri.startswith("hf://"):
            self._skip(f"{name}.uri {uri}", "the run downloads it whole")
            return
        try:
            if uri.startswith("s3://") and (size := object_bytes(uri, self._open_store)) > _CHEAP_BYTES:
                self._skip(f"{name}.uri {uri}", f"it is there, and {size / 1e6:.0f} MB are not read twice")
                return
            usable = usable_prompts(
                prompts,
                tokenizer,
                base_dir=self._plan.job_file.parent,
                max_prompt_tokens=config.model.max_model_len - config.task.sampling.max_tokens,
                limit=wanted,
                open_store=self._open_store,
            )
        except StoreUnavailable as error:
            self._skip(f"{name}.uri {uri}", str(error))
            return
        if training:
            refuse_few_prompts(len(usable.kept), config)
        first = f"{len(usable.kept[0][1])} tokens the first"
        self._found.checked.append(f"{name} {name_of(prompts)}: {len(usable.kept)} prompts, {first}")

    def _open_store(self, uri: str) -> ObjectStore:
        """As the run's own processes open it. Raises: StoreUnavailable if that cannot be done here and now."""
        if self._plan.embedded and uri.startswith("s3://"):
            raise StoreUnavailable("the run starts that server")
        try:
            return open_address(self._plan.storage.model_copy(update={"uri": uri}))
        except UserError as error:  # such as no credentials on this machine
            raise StoreUnavailable(str(error)) from error

    def _skip(self, what: str, why: str) -> None:
        self._found.not_checked.append(f"{what}: {why}")
