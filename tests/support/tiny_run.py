"""A run of the tiny random model in a directory, in this process, fed by hand."""

from support.tiny_models import save_tiny

from tba import telemetry
from tba.contracts.config import LiveConfig
from tba.contracts.keys import ShardKey
from tba.contracts.records import FinishReason, Outcome, ShardHeader, Span, Trajectory
from tba.contracts.runfile import RunFile
from tba.shards import encode_shard
from tba.stop import StopFlag
from tba.trainer.loop import Trainer
from tba.trainer.progress import Tracker
from tba.trainer.startup import prepare

INCARNATION = "c" * 32


class TinyRun:
    """One trainer after another."""

    def __init__(self, folder, *, min_initial=8, ingest="Continuous", fork_from=None, model=None, **objective):
        """`fork_from`: another run and a step of it, in place of the random model. `model`: changes to its section."""
        folder.mkdir(exist_ok=True)
        if fork_from is None:
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
                    "model": {"uri": "file://model", "dtype": "float32", "maxModelLen": 32, **(model or {})},
                    "task": {
                        "prompts": {"uri": "file://prompts.jsonl", "answerField": None},
                        "reward": {"name": "fake"},
                        "sampling": {"maxTokens": 8},
                    },
                    "objective": {"responsesPerPrompt": 2, "promptsPerBatch": 2, "totalSteps": 3, **objective},
                    "buffer": {"minInitialTrajectories": min_initial, "maxReplayRatio": None},
                    "forkFrom": fork_from and {"uri": fork_from[0].uri, "step": fork_from[1]},
                },
            }
        )

    def trainer(self) -> Trainer:
        """Claims the run."""
        self.stop = StopFlag()
        self.ready = prepare(self.file, self.live, self.uri)
        beat = telemetry.Heartbeat(60.0)
        return Trainer(
            self.ready, lambda: self.live, stop=self.stop, heartbeat=beat, grace_seconds=60.0, tracker=Tracker(3)
        )

    def put_shard(self, seq: int, *, failed: bool = False) -> str:
        """Two visits of two rows each; `failed`: none of them has a reward."""
        rows = [
            Trajectory(
                prompt_id=prompt,
                visit=10 * seq + prompt,
                visit_size=2,
                prompt_tokens=self.ready.prompts.prompt_tokens(prompt).tolist(),
                response_tokens=[1 + seq, 2 + sample, 12],
                outcome=Outcome.FAILED if failed else Outcome.SCORED,
                reward=None if failed else float(sample),
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
