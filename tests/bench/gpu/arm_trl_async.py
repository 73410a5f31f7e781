"""Arm 4: TRL's AsyncGRPO (experimental; read in TRL 1.16.0) with an engine's server on the other card.

    this process: AsyncGRPOTrainer ── weights by NCCL, each step ──► vllm serve (another process, another card)
          ▲                                                             ▲ HTTP, maxNumSeqs requests at a time
          └── queue of scored rows ◄── TRL's rollout process (reward) ──┘

As published but for two things that it takes from the network or from a list, and that a host without one lacks:

* Attention. TRL packs rows into a tree and runs a FlashAttention 3 kernel on it that it downloads (`kernels`,
  kernels-community/flash-attn3). Here `varlen_attn` of torch serves, as it does in our trainer: the same function.
* The form of an answer. TRL knows chat templates by their text and not SmolLM2's; CHATML says how its answers end.

Its settings: what the job says of batch, optimizer, interval and lag; clip .2 as by default; rows by number and not by
tokens (`token_budget` 0), or a step would not be a batch of P x K. Held-out prompts are answered afterwards, with the
weights kept at each tenth step, as in arms 5 to 8. The clock begins when the rollout process does.
"""

import argparse
import json
import os
import time
from typing import Any

os.environ.setdefault("VLLM_HOST_IP", "127.0.0.1")  # else vLLM looks for an address on the network

import torch
from bench.gpu import trl_run
from bench.gpu.varlen import flash_attn_varlen_func
from torch import Tensor
from transformers import AutoTokenizer
from trl.experimental.async_grpo import (  # pyright: ignore[reportMissingImports]
    AsyncGRPOConfig,
    AsyncGRPOTrainer,
    async_grpo_trainer,
    packing,
)
from trl.experimental.async_grpo.vllm_client import VLLMClient  # pyright: ignore[reportMissingImports]

from tba.contracts.keys import WeightsKey, new_nonce
from tba.models import load_model, weight_tensors
from tba.snapshots import publish_snapshot
from tba.store import open_store
from tba.trainer.model import DTYPES

CHATML = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {"content": {"close_pattern": r"<\|im_end\|>\s*", "content": "text"}},
}


class TorchFlash:
    """In the place of the kernel's module."""

    flash_attn_varlen_func = staticmethod(flash_attn_varlen_func)


class NoTransfer:
    """For rehearsals on a CPU, where there is no NCCL: the server keeps the start's weights."""

    def __init__(self, server: str) -> None:
        self._client = VLLMClient(server)

    def init_weight_transfer(self) -> None:
        self._client.wait_for_server_ready()

    def pause(self) -> None: ...

    def send_weights(self, iterator: Any) -> None: ...

    def resume(self) -> None: ...

    def destroy(self) -> None: ...


def main() -> None:
    """Command line."""
    options = trl_run.parse()
    packing._flash_attn = TorchFlash
    if not torch.cuda.is_available():
        async_grpo_trainer.get_peak_flops_per_device = lambda *_: None  # it asks for the GPU's name
    watch, trainer = Watch(options), prepare(options)
    watch.trainer = trainer
    trainer.add_callback(watch)  # after TRL's own: at a step's end the server has its weights
    trainer.train()
    watch.keep_all()
    options.result.write_text(json.dumps(watch.result()))
    os._exit(0)  # vLLM's threads would hold the process


def prepare(options: argparse.Namespace) -> AsyncGRPOTrainer:
    """The trainer."""
    spec = options.spec
    folder = spec.model.uri.removeprefix("file://")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.response_template = CHATML
    config = AsyncGRPOConfig(
        **trl_run.settings(options, world=1),
        token_budget=0,
        max_inflight_tasks=spec.searcher.engine.max_num_seqs,
        max_staleness=spec.buffer.max_policy_lag,
        weight_sync_steps=spec.sync.interval_steps,
        vllm_server_base_url=options.server,
    )
    return AsyncGRPOTrainer(
        model=folder,
        reward_funcs=trl_run.BatchReward(spec.task.reward, processes=1),
        args=config,
        train_dataset=trl_run.dataset(spec),
        processing_class=tokenizer,
        weight_transfer=None if torch.cuda.is_available() else NoTransfer(options.server),
    )


class Watch(trl_run.Clock):
    """Keeps weights for scoring: copies on the device cost milliseconds, and generation goes on meanwhile."""

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__(options)
        self._kept: dict[int, dict[str, Tensor]] = {}
        self._logs: list[dict[str, Any]] = []
        self._began = 0.0

    def note(self, logs: dict[str, Any]) -> None:
        """For the facts."""
        self._logs.append(logs)

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """The server has the start's weights and rollouts begin."""
        self._keep(0)
        self.started, self._began = time.perf_counter(), time.time()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
        """Keep the new weights now and then."""
        step = int(state.global_step)
        if step % self.options.evaluate_every == 0:
            self._keep(step)
        control.should_training_stop = self.over(step)
        return control

    def _keep(self, step: int) -> None:
        model = self.trainer.accelerator.unwrap_model(self.trainer.model)
        dtype = DTYPES[self.options.spec.model.dtype]
        self._kept[step] = {n: t.detach().to(dtype, copy=True) for n, t in weight_tensors(model).items()}

    def keep_all(self) -> None:
        """Write them as our trainer would, to be scored by what scores its own; the clock is over."""
        self._between = [self._began, time.time()]
        store = open_store(self.options.store)
        assets = load_model(self.options.spec.model, base_dir=self.options.job.parent).assets
        for step, tensors in self._kept.items():
            host = {name: tensor.cpu() for name, tensor in tensors.items()}
            publish_snapshot(store, WeightsKey(step, 1, new_nonce()), host, assets=assets, parent=None, evaluation=None)

    def result(self) -> dict[str, Any]:
        """Facts by the names that our arms give them; `held_out` holds the times of steps alone, scores come later."""
        names = {
            "response tokens/s": "rollout/generated_tok_s",
            "mean staleness": "sample/staleness_mean",
            "train s/step": "perf/fwd_bwd_s",
            "sync s/step": "perf/weight_sync_s",
        }
        self.facts = {name: _mean(self._logs, key) for name, key in names.items()}
        span = self.steps[-1][0]
        self.facts["trainer waits for data"] = sum(_values(self._logs, "perf/rollout_wait_s")) / span
        self.facts["rows dropped as stale"] = sum(_values(self._logs, "sample/dropped_stale_total"))
        return super().result() | {"between": self._between}


def _values(logs: list[dict[str, Any]], key: str) -> list[float]:
    return [float(found[key]) for found in logs if found.get(key) is not None]


def _mean(logs: list[dict[str, Any]], key: str) -> float:
    values = _values(logs, key)
    return sum(values) / len(values) if values else 0.0


if __name__ == "__main__":
    main()
