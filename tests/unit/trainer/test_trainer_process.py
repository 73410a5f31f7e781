"""The trainer process before it has anything to train: what it answers while it starts."""

import json
import urllib.error
import urllib.request

import pytest

from tba.contracts.errors import UserError
from tba.contracts.runfile import LIVE_FILE, RUN_FILE
from tba.trainer import main
from tba.trainer.main import START_BUDGET_SECONDS, TrainerOptions, run_trainer


def configure(folder) -> None:
    run = {
        "owner": "default/tiny",
        "name": "tiny",
        "config": {
            "model": {"uri": "file://model", "maxModelLen": 32},
            "task": {
                "prompts": {"uri": "file://prompts.jsonl"},
                "reward": {"name": "fake"},
                "sampling": {"maxTokens": 8},
            },
            "objective": {"responsesPerPrompt": 2, "promptsPerBatch": 2, "totalSteps": 7},
            "buffer": {"minInitialTrajectories": 0},
        },
    }
    (folder / RUN_FILE).write_text(json.dumps(run))
    (folder / LIVE_FILE).write_text(json.dumps({"storage": {"uri": f"file://{folder}/store"}}))


def answer_of(url: str) -> tuple[int, str]:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=10) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def test_a_trainer_that_starts_is_alive_not_ready_and_says_so(tmp_path, monkeypatch):
    configure(tmp_path)
    monkeypatch.setenv("TBA_PORT_FILE", str(tmp_path / "port"))
    monkeypatch.setenv("TBA_HTTP_HOST", "127.0.0.1")
    monkeypatch.setenv("TBA_POD_UID", "pod-1")
    answers = {}

    def prepare(*_arguments, **_options):
        port = (tmp_path / "port").read_text()
        answers.update(
            {path: answer_of(f"http://127.0.0.1:{port}/{path}") for path in ("healthz", "readyz", "progress")}
        )
        raise UserError("this is as far as it goes")

    monkeypatch.setattr(main, "prepare", prepare)
    monkeypatch.setattr(main, "configure", lambda **_: None)  # the log of the other tests stays as it is
    with pytest.raises(UserError, match="as far as it goes"):
        run_trainer(TrainerOptions(tmp_path, port=0))
    assert answers["healthz"][0] == 200 and f"budget {START_BUDGET_SECONDS:.0f} s" in answers["healthz"][1]
    assert answers["readyz"] == (503, "not ok: Starting\n")
    progress = json.loads(answers["progress"][1])
    told = [progress[name] for name in ("state", "runId", "podUid", "totalSteps")]
    assert told == ["Starting", "", "pod-1", 7]
