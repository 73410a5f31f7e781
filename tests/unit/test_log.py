import json
import logging
import re
import threading
from pathlib import Path

import pytest
import structlog

from tba import log as log_module
from tba.log import STEP_COMPLETED, bind, configure, log


@pytest.fixture
def lines(tmp_path):
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    path = tmp_path / "log.jsonl"
    configure(role="trainer", run="gsm8k", file=path)
    stream = root.handlers[0].stream
    yield lambda: [json.loads(line) for line in path.read_text().splitlines()]
    stream.close()
    root.handlers[:] = before
    root.setLevel(level)
    structlog.reset_defaults()


def test_a_line_carries_event_run_role_and_what_was_bound(lines):
    bind(step=3, policy_version=2)
    log.info(STEP_COMPLETED, loss=0.5)
    (line,) = lines()
    assert line["event"] == "step_completed"
    assert (line["run"], line["role"], line["step"], line["policy_version"], line["loss"]) == (
        "gsm8k", "trainer", 3, 2, 0.5,
    )  # fmt: skip


def test_what_is_bound_holds_in_every_thread(lines):
    bind(step=4)
    thread = threading.Thread(target=log.info, args=(STEP_COMPLETED,))
    thread.start()
    thread.join()
    assert lines()[0]["step"] == 4


def test_libraries_that_use_standard_logging_end_up_in_the_same_lines(lines):
    logging.getLogger("some.library").warning("careful: %s", "x")
    assert lines()[0]["event"] == "careful: x"
    assert lines()[0]["run"] == "gsm8k"


def test_a_traceback_holds_no_local_variables(lines):
    secret = "hunter2"
    try:
        raise ValueError("bad")
    except ValueError:
        log.exception("run_failed")
    text = json.dumps(lines())
    assert "ValueError: bad" in text
    assert secret not in text.replace('secret = \\"hunter2\\"', "")


def test_every_event_name_is_written_by_some_module():
    names = {k: v for k, v in vars(log_module).items() if k.isupper() and isinstance(v, str)}
    files = [f for f in Path(log_module.__file__).parent.rglob("*.py") if f.name != "log.py"]
    text = "\n".join(f.read_text(encoding="utf-8") for f in files)
    assert not [v for k, v in names.items() if not re.search(rf'\b{k}\b|"{v}"', text)]


def test_every_event_name_is_a_noun_and_what_happened_to_it():
    names = [v for k, v in vars(log_module).items() if k.isupper() and isinstance(v, str)]
    assert len(names) > 20
    assert all(re.fullmatch(r"[a-z]+(_[a-z]+)+", n) for n in names)
