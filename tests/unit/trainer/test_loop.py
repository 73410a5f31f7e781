"""The training loop on a tiny real model and a directory: what SIGTERM, waits and rollbacks leave behind."""

import threading
import time

import pytest
import torch
from support.tiny_models import save_tiny

from tba import telemetry
from tba.contracts.config import LiveConfig
from tba.contracts.errors import UserError
from tba.contracts.history import EvalRow
from tba.contracts.keys import CHECKPOINTS, LATEST, MANIFEST, ShardKey, WeightsKey
from tba.contracts.records import EvalRequest, FinishReason, Outcome, ShardHeader, Span, Trajectory
from tba.contracts.runfile import RunFile
from tba.shards import encode_shard
from tba.trainer.checkpoint import read_checkpoint
from tba.trainer.evaluate import Pending
from tba.trainer.loop import Terminated, Trainer
from tba.trainer.replay import read_recorded, replay
from tba.trainer.startup import prepare

INCARNATION = "c" * 32
HANG = 60.0  # seconds after which a test that waits for the loop has failed


class Run:
    """A run in a directory, one trainer after another."""

    def __init__(self, folder, *, min_initial=8, ingest="Continuous", **objective):
        save_tiny(folder / "model", tied=True)
        (folder / "prompts.jsonl").write_text("".join(f'{{"question": "{i}+{i}="}}\n' for i in range(4)))
        self.uri = f"file://{folder}/store"
        self.live = LiveConfig.model_validate(
            {
                "storage": {"uri": self.uri},
                "sync": {"pollIntervalSeconds": 0.01, "ingest": ingest},
                "buffer": {"maxReplayRatio": None},
            }
        )
        self.file = RunFile.model_validate(
            {
                "owner": "default/tiny",
                "name": "tiny",
                "baseDir": str(folder),
                "config": {
                    "model": {"uri": "file://model", "dtype": "float32", "maxModelLen": 32},
                    "task": {
                        "prompts": {"uri": "file://prompts.jsonl", "answerField": None},
                        "reward": {"name": "fake"},
                        "sampling": {"maxTokens": 8},
                    },
                    "objective": {"responsesPerPrompt": 2, "promptsPerBatch": 2, "totalSteps": 3, **objective},
                    "buffer": {"minInitialTrajectories": min_initial, "maxReplayRatio": None},
                },
            }
        )

    def trainer(self) -> Trainer:
        self.stop = threading.Event()
        self.ready = prepare(self.file, self.live, self.uri)
        beat = telemetry.Heartbeat(60.0)
        return Trainer(self.ready, lambda: self.live, stop=self.stop, heartbeat=beat, grace_seconds=60.0)

    def put_shard(self, seq: int) -> str:
        """Two visits of two rows each."""
        rows = [
            Trajectory(
                prompt_id=prompt,
                visit=10 * seq + prompt,
                visit_size=2,
                prompt_tokens=self.ready.prompts.prompt_tokens(prompt).tolist(),
                response_tokens=[1 + seq, 2 + sample, 12],
                outcome=Outcome.SCORED,
                reward=float(sample),
                finish_reason=FinishReason.STOP,
                spans=[Span(3, 1, 0)],
                temperature=1.0,
                created_at=0.0,
            )
            for prompt in (seq % 3, 3)
            for sample in range(2)
        ]
        run = self.ready.record.run_id
        header = ShardHeader(run=run, searcher="s", incarnation=INCARNATION, seq=seq, reward_version="v")
        path = ShardKey(1, "s", INCARNATION, seq).path
        self.ready.store.put_once(path, encode_shard(header, rows))
        return path


def stopped_in_a_wait(run: Run, *, rows: int) -> None:
    """Run a trainer until it waits with so many rows ingested, then ask it to end."""
    trainer, ended = run.trainer(), []
    thread = threading.Thread(target=lambda: ended.append(pytest.raises(Terminated, trainer.run)))
    thread.start()
    deadline = time.monotonic() + HANG
    while run.ready.learner.counters.ingested_rows < rows and time.monotonic() < deadline:
        time.sleep(0.005)
    run.stop.set()
    thread.join(HANG)
    assert ended, "the trainer must end by itself"


@pytest.mark.parametrize("ingest", ["Continuous", "AtSync"])
def test_rows_ingested_in_a_wait_before_sigterm_survive_in_the_log_and_in_the_replay(tmp_path, ingest):
    run = Run(tmp_path, ingest=ingest)
    run.trainer()  # makes run and prompts
    first = run.put_shard(0)
    stopped_in_a_wait(run, rows=4)
    stopped_in_a_wait(run, rows=4)  # and once more, without a step in between
    second = run.put_shard(1)
    run.trainer().run()
    recorded = read_recorded(run.ready.store)
    assert [e.key for e in recorded.entries if e.key] == [first, second]
    torch.testing.assert_close(
        replay(run.ready.store).policy.master_state(),
        dict(read_checkpoint(run.ready.store, recorded.latest.checkpoint or "")[1].tensors["master"]),
        rtol=0,
        atol=0,
    )


def test_a_moving_reference_does_not_ask_for_a_checkpoint_at_every_step(tmp_path):
    run = Run(tmp_path, min_initial=0, reference={"type": "EMA", "decay": 0.9})
    trainer = run.trainer()
    run.put_shard(0)
    trainer.run()
    made = [o.key for o in run.ready.store.list_after(CHECKPOINTS) if o.key.endswith(MANIFEST)]
    assert len(made) == 2  # steps 0 and 3


def test_a_lost_latest_is_never_taken_for_a_new_run(tmp_path):
    run = Run(tmp_path, min_initial=0)
    trainer = run.trainer()
    run.put_shard(0)
    trainer.run()
    run.ready.store.delete([LATEST])
    with pytest.raises(UserError, match="never starts again from step 0"):
        run.trainer()


class Stuck:
    """A background task that storage refuses."""

    waiting_since = 0.0

    def join(self, _timeout):
        return False


def test_sigterm_ends_a_wait_for_storage_that_does_not_answer(tmp_path):
    run = Run(tmp_path)
    trainer = run.trainer()
    run.stop.set()
    with pytest.raises(Terminated):
        trainer._join(Stuck())  # type: ignore[arg-type]
    assert trainer.tracker.state == "WaitingForStorage"


def test_an_evaluation_without_any_reward_is_no_score_of_zero(tmp_path):
    trainer = Run(tmp_path).trainer()
    request = EvalRequest(prompts="p", num_prompts=2, block_prompts=2, sampling="greedy", samples=1)
    row = EvalRow(
        epoch=1, step=0, time=0.0, policy_epoch=1, num_prompts=0, samples=1, sampling="greedy", pass_at_1=0.0,
        pass_at_k=0.0, standard_error=0.0, failed=2, mean_response_tokens=3.0,
    )  # fmt: skip
    trainer._after_evaluation(Pending(WeightsKey(0, 1, "0" * 32).path, request, 0.0), row)
    trainer._apply_results()
    assert trainer.tracker.eval_score is None and trainer._book.eval_score is None
