"""Real reward processes that hang, crash, print for ever and eat memory."""

import errno
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import tba
from tba.contracts.config import ConfigMapRef, Reward
from tba.contracts.errors import UserError
from tba.contracts.records import Outcome
from tba.rewards.sandbox import RewardCall, RewardPool, RewardResult

WORKLOADS = Path(tba.__file__).parents[1]
TIMEOUT = 1.5
MEMORY = 512 * 1024**2

NAUGHTY = '''
"""A reward that does what its prompt says, and otherwise returns the response as a number."""
import ctypes, os, signal, subprocess, sys, threading, time

hoard = []

class Unprintable(Exception):
    def __str__(self):
        raise RuntimeError("no text")

def reward(prompt, response, answer):
    match prompt:
        case "loop":
            while True: pass
        case "sleep": time.sleep(float(response))
        case "tower": return float(9 ** 9 ** 9 ** 9)
        case "exit": os._exit(3)
        case "sys.exit": sys.exit(0)
        case "segfault": ctypes.string_at(8)
        case "kill": os.kill(os.getpid(), signal.SIGKILL)
        case "memory": return float(len(bytes(1 << 30)))  # untouched: address space alone
        case "hoard":
            while True: hoard.append(bytes(1 << 24))
        case "print":
            while True: print("x" * 1000)
        case "print much":
            for _ in range(2000): print("x" * 1000, file=sys.stderr)
        case "raise": raise KeyError("absent " + "x" * 10_000)
        case "unprintable": raise Unprintable
        case "nan": return float("nan")
        case "inf": return float("inf")
        case "text": return "1.0"
        case "none": return None
        case "bool": return True
        case "int": return 1
        case "close": os.closerange(0, 100); time.sleep(60)
        case "close output": os.closerange(1, 3)
        case "scribble" | "forge":
            text = b"!" if prompt == "scribble" else response.encode()
            os.write(int(sys.argv[1]), len(text).to_bytes(4) + text)
            time.sleep(60)
        case "alarm": signal.setitimer(signal.ITIMER_REAL, 0.05)
        case "fork": os.fork()
        case "thread": threading.Thread(target=time.sleep, args=(60,)).start()
        case "stdin": return float(len(sys.stdin.read()))
        case "children":
            for session in (False, True):
                child = subprocess.Popen(["sleep", "600"], start_new_session=session)
                with open(response, "a") as file: file.write(f"{child.pid}\\n")
            for _ in range(2):
                if (pid := os.fork()) == 0:
                    os.setsid()
                    if os.fork(): os._exit(0)
                    with open(response, "a") as file: file.write(f"{os.getpid()}\\n")
                    while True: time.sleep(1)
            while True: time.sleep(1)
        case "pid": return float(os.getpid())
    return float(response)
'''


@pytest.fixture
def code(tmp_path):
    (tmp_path / "naughty.py").write_text(NAUGHTY)
    return tmp_path


@pytest.fixture
def pool(code):
    pool = make_pool(code, num_workers=2, timeout_seconds=30)
    yield pool
    pids = pool.process_ids()
    pool.close()
    assert not any(alive(pid) for pid in pids)


def make_pool(code, **arguments) -> RewardPool:
    arguments = {"num_workers": 1, "timeout_seconds": 30, "memory_bytes": MEMORY, **arguments}
    return RewardPool(Reward(entrypoint="naughty:reward"), search_path=code, **arguments)


def alive(pid: int) -> bool:
    """Whether the process exists and is no zombie (an orphan's zombie is its new parent's to collect)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def gone(pids, seconds=10.0) -> bool:
    end = time.monotonic() + seconds
    while any(map(alive, pids)) and time.monotonic() < end:
        time.sleep(0.02)
    return not any(map(alive, pids))


def between_neighbours(pool: RewardPool, prompt: str, response: str = "7") -> RewardResult:
    """Score a naughty call among good ones, and check the good ones."""
    good = [RewardCall("good", str(i), None) for i in range(40)]
    results = pool.score([*good[:20], RewardCall(prompt, response, None), *good[20:]])
    naughty = results.pop(20)
    assert [r.reward for r in results] == [float(i) for i in range(40)]
    assert all(r.outcome is Outcome.SCORED and r.error == "" for r in results)
    return naughty


@pytest.mark.parametrize(
    ("prompt", "reason", "error"),
    [
        ("exit", "crash", "exited with status 3"),
        ("segfault", "crash", "signal 11 .*Segmentation"),
        ("kill", "crash", "signal 9"),
        ("close", "crash", "ended by signal 9"),
        ("scribble", "crash", "wrote to the pool's own socket"),
        ("memory", "memory", "MemoryError"),
        ("hoard", "memory", r"MemoryError.*naughty.py:\d+"),
        ("sys.exit", "exception", "SystemExit: 0"),
        ("raise", "exception", r"KeyError: 'absent x+ \(naughty.py:\d+\)"),
        ("unprintable", "exception", "Unprintable"),
        ("nan", "invalid", "nan"),
        ("inf", "invalid", "inf"),
        ("text", "invalid", "returned str"),
        ("none", "invalid", "returned NoneType"),
        ("bool", "invalid", "returned bool"),
    ],
)
def test_a_failing_call_costs_only_its_own_sample(pool, prompt, reason, error):
    result = between_neighbours(pool, prompt)
    assert (result.outcome, result.reward) == (Outcome.FAILED, None)
    assert re.search(error, result.error, re.DOTALL)
    assert len(result.error) < 700
    assert dict(pool.failures) == {reason: 1}


@pytest.mark.parametrize("forged", ["[]", "{}", "3", "[1000000, 1.0]", '["a", 2]', "[" * 100_000])
def test_a_forged_reply_costs_only_its_own_sample(pool, forged):
    result = between_neighbours(pool, "forge", forged)
    assert (result.outcome, result.error) == (Outcome.FAILED, "the reward wrote to the pool's own socket")


@pytest.mark.parametrize("prompt", ["loop", "tower", "print"])
def test_a_call_that_never_ends_is_killed_and_costs_only_its_own_sample(pool, prompt):
    pool.set_limits(TIMEOUT, MEMORY)
    started = time.monotonic()
    result = between_neighbours(pool, prompt)
    assert (result.outcome, result.reward) == (Outcome.TIMED_OUT, None)
    assert f"{TIMEOUT} s" in result.error
    assert TIMEOUT <= time.monotonic() - started < TIMEOUT + 5
    assert dict(pool.failures) == {"timeout": 1}


@pytest.mark.parametrize(
    ("prompt", "reward"), [("print much", 7), ("int", 1), ("close output", 7), ("alarm", 7), ("thread", 7), ("fork", 7)]
)
def test_an_odd_call_that_returns_is_scored(pool, prompt, reward):
    for _ in range(2):
        assert between_neighbours(pool, prompt) == RewardResult(Outcome.SCORED, reward)
    time.sleep(0.1)  # an alarm left behind would have struck by now
    assert between_neighbours(pool, "good") == RewardResult(Outcome.SCORED, 7.0)
    assert not pool.failures and pool.restarts == 0


def test_standard_input_is_empty(pool):
    assert between_neighbours(pool, "stdin").reward == 0.0


def test_everything_a_timed_out_call_started_is_killed(pool, tmp_path):
    pool.set_limits(TIMEOUT, MEMORY)
    result = between_neighbours(pool, "children", str(tmp_path / "pids"))
    pids = [int(line) for line in (tmp_path / "pids").read_text().split()]
    assert result.outcome is Outcome.TIMED_OUT
    assert len(pids) == 4  # two children, one in its own session, and two daemons
    assert gone(pids)


def test_calls_that_always_crash_are_all_counted_and_restarts_slow_down(code):
    with make_pool(code) as pool:
        started = time.monotonic()
        results = pool.score([RewardCall("exit", "1", None)] * 6)
        assert [r.outcome for r in results] == [Outcome.FAILED] * 6
        assert time.monotonic() - started > 0.05 + 0.1 + 0.2 + 0.4  # the back-off before the third to the sixth start
        assert pool.failures["crash"] == 6
        assert between_neighbours(pool, "good").reward == 7.0


def test_calls_from_several_threads_get_their_own_results(code):
    with make_pool(code, num_workers=3) as pool, ThreadPoolExecutor(4) as threads:

        def score(start: int) -> list[float | None]:
            calls = [RewardCall("raise" if i % 50 == 0 else "good", str(i), None) for i in range(start, start + 500)]
            return [result.reward for result in pool.score(calls)]

        starts = range(0, 4000, 500)
        for start, rewards in zip(starts, threads.map(score, starts), strict=True):
            assert rewards == [None if i % 50 == 0 else float(i) for i in range(start, start + 500)]
        assert pool.failures["exception"] == 80


def test_slow_calls_spread_over_the_workers(code):
    with make_pool(code, num_workers=4, timeout_seconds=20) as pool:
        while len({r.reward for r in pool.score([RewardCall("pid", "", None)] * 50)}) < 4:
            pass  # the other processes are still starting; quick calls open the windows meanwhile
        started = time.monotonic()
        results = pool.score([RewardCall("sleep", "0.3", None)] * 8)
        assert all(r.reward == 0.3 for r in results)
        assert time.monotonic() - started < 8 * 0.3  # one after another would take that long


def test_the_time_limit_is_of_one_call_and_not_of_the_queue(code):
    with make_pool(code, timeout_seconds=TIMEOUT) as pool:
        results = pool.score([RewardCall("sleep", "0.2", None)] * 12)  # 2.4 s in all, more than the limit
        assert [r.outcome for r in results] == [Outcome.SCORED] * 12


def test_a_shorter_time_limit_applies_to_the_running_call(code):
    with make_pool(code, timeout_seconds=300) as pool:
        future = pool.submit(RewardCall("loop", "1", None))
        pool.set_limits(0.2, MEMORY)
        assert future.result(timeout=20).outcome is Outcome.TIMED_OUT


def test_a_higher_memory_limit_applies_without_a_restart(code):
    with make_pool(code, memory_bytes=256 * 1024**2, timeout_seconds=20) as pool:
        (before,) = pool.process_ids()
        pool.set_limits(20, 4 * 1024**3)
        call = RewardCall("memory", "1", None)
        assert pool.score([call])[0] == RewardResult(Outcome.SCORED, float(1 << 30))
        assert pool.process_ids() == [before]
        pool.set_limits(20, 256 * 1024**2)
        assert pool.score([call])[0].outcome is Outcome.FAILED


def test_a_pool_grows_while_it_scores(code):
    with make_pool(code, num_workers=1, timeout_seconds=20) as pool:
        pool.resize(4)
        deadline = time.monotonic() + 20
        while len({r.reward for r in pool.score([RewardCall("pid", "", None)] * 50)}) < 4:
            assert time.monotonic() < deadline
        assert len(set(pool.process_ids())) == 4 and pool.restarts == 0


def test_a_pool_that_shrinks_ends_its_last_processes_and_loses_no_call(code):
    with make_pool(code, num_workers=4, timeout_seconds=20) as pool:
        while len({r.reward for r in pool.score([RewardCall("pid", "", None)] * 50)}) < 4:
            pass
        before = pool.process_ids()
        futures = [pool.submit(RewardCall("sleep", "0.3", None)) for _ in range(8)]
        pool.resize(1)
        assert [f.result(timeout=20).reward for f in futures] == [0.3] * 8
        assert pool.process_ids() == before[:1] and gone(before[1:])
        assert not pool.failures and pool.restarts == 0


def test_a_process_that_was_about_to_start_again_does_not_when_the_pool_shrinks(code):
    with make_pool(code, num_workers=2, timeout_seconds=20) as pool:
        while len({r.reward for r in pool.score([RewardCall("pid", "", None)] * 50)}) < 2:
            pass
        last = pool._workers[1]
        reaped, last.reap = last.reap, lambda _: None  # it takes its time to die
        last._deaths = 4  # and this is not its first end
        os.kill(pool.process_ids()[1], signal.SIGKILL)
        while len(pool.process_ids()) > 1:
            pass
        pool.resize(1)
        pool.score([RewardCall("sleep", "1.5", None)])  # longer than the pause before its next start
        last.reap = reaped
        assert last.process is None and len(pool.process_ids()) == 1


def test_no_pool_is_without_a_process(code):
    with make_pool(code) as pool, pytest.raises(ValueError, match="num_workers must be at least 1, got 0"):
        pool.resize(0)


def test_closing_kills_running_calls_and_settles_all_futures(code):
    pool = make_pool(code, num_workers=2)
    pids = pool.process_ids()
    futures = [pool.submit(RewardCall("loop", "1", None)) for _ in range(10)]
    pool.close()
    pool.close()
    assert not any(map(alive, pids)) and pool.process_ids() == []
    assert [f.result(timeout=0).outcome for f in futures] == [Outcome.FAILED] * 10
    assert pool.failures["closed"] == 10
    with pytest.raises(RuntimeError, match="closed"):
        pool.submit(RewardCall("good", "1", None))


def test_a_result_callback_may_submit_again_and_close(code):
    pool = make_pool(code)
    done = threading.Event()

    def again(future):
        second = pool.submit(RewardCall("good", "2", None))
        second.add_done_callback(lambda _: (pool.close(), done.set()))

    pool.submit(RewardCall("good", "1", None)).add_done_callback(again)
    assert done.wait(20)
    pool.close()


def test_processes_end_with_a_killed_parent(code):
    program = f"""
    import sys; sys.path.insert(0, {str(WORKLOADS)!r})
    from pathlib import Path
    from tba.contracts.config import Reward
    from tba.rewards.sandbox import RewardCall, RewardPool
    reward = Reward(entrypoint="naughty:reward", timeout_seconds=300)
    pool = RewardPool(reward, num_workers=2, search_path=Path({str(code)!r}))
    while len(pool.process_ids()) < 2: pass
    pool.submit(RewardCall("loop", "1", None))
    print(*pool.process_ids(), flush=True)
    pool.submit(RewardCall("sleep", "600", None)).result()
    """
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program)], stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(pids) == 2 and all(map(alive, pids))
        parent.send_signal(signal.SIGKILL)
    assert gone(pids)


def test_a_pool_left_open_ends_with_its_program(code):
    program = f"""
    import sys; sys.path.insert(0, {str(WORKLOADS)!r})
    from pathlib import Path
    from tba.contracts.config import Reward
    from tba.rewards.sandbox import RewardCall, RewardPool
    pool = RewardPool(Reward(entrypoint="naughty:reward"), num_workers=1, search_path=Path({str(code)!r}))
    pool.submit(RewardCall("loop", "1", None))
    print(*pool.process_ids())
    """
    command = [sys.executable, "-c", textwrap.dedent(program)]
    output = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    assert output.stderr == "" and gone([int(output.stdout)])


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        (Reward(name="gsm9k"), "no such reward.*gsm8k"),
        (Reward(name="gsm8k", parameters={"mood": "strict"}), "'mood'"),
        (Reward(entrypoint="absent_module_z:reward"), "no module 'absent_module_z'"),
        (Reward(entrypoint="naughty:rewards"), "naughty.py has no function 'rewards'"),
        (Reward(entrypoint="raises:reward"), r"ZeroDivisionError: division by zero \(raises.py:1\)"),
        (Reward(entrypoint="hungry:reward"), "MemoryError"),
        (Reward(config_map_ref=ConfigMapRef(name="code", key="absent.py")), "absent.py"),
        (
            Reward(config_map_ref=ConfigMapRef(name="code", key="wrong.py")),
            r"SyntaxError: .*\(wrong.py, line 1\)(?!.*importlib)",
        ),
    ],
)
def test_a_reward_that_cannot_be_loaded_is_a_user_error_and_leaves_nothing(code, reward, message):
    (code / "raises.py").write_text("1 / 0")
    (code / "hungry.py").write_text("bytes(1 << 30)")
    (code / "wrong.py").write_text("def reward(:")
    threads = threading.active_count()
    files = len(os.listdir("/proc/self/fd"))
    with pytest.raises(UserError, match=message):
        RewardPool(reward, num_workers=2, timeout_seconds=TIMEOUT, memory_bytes=MEMORY, search_path=code)
    assert threading.active_count() == threads
    assert len(os.listdir("/proc/self/fd")) == files


def test_a_first_start_that_may_go_better_next_time_is_a_crash_and_no_user_error(code, monkeypatch):
    (code / "exits.py").write_text("import os; os._exit(5)")
    (code / "slow.py").write_text("import time; time.sleep(60)")

    def refused(entrypoint: str) -> pytest.ExceptionInfo[RuntimeError]:
        with pytest.raises(RuntimeError) as caught:
            RewardPool(Reward(entrypoint=entrypoint), num_workers=2, search_path=code)
        return caught

    assert "exited with status 5" in str(refused("exits:reward").value)
    monkeypatch.setattr("tba.rewards.worker.START_SECONDS", 0.3)
    assert "longer than 0.3 s" in str(refused("slow:reward").value)

    def no_slots(*_args, **_settings):
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr("tba.rewards.process.subprocess.Popen", no_slots)
    assert "temporarily unavailable" in str(refused("naughty:reward").value)


def test_a_config_map_file_keeps_its_code_when_the_file_changes(code):
    (code / "rewards").mkdir()
    file = code / "rewards" / "mine.py"
    file.write_text("import os\ndef reward(p, r, a, *, scale): return scale * float(r) if p != 'exit' else os._exit(1)")
    reward = Reward(config_map_ref=ConfigMapRef(name="rewards", key="mine.py"), parameters={"scale": 2})
    with RewardPool(reward, num_workers=1, search_path=code) as pool:
        file.write_text("def reward(p, r, a, *, scale): return 0.0")
        results = pool.score([RewardCall(p, "3", None) for p in ("", "exit", "")])
        assert [r.reward for r in results] == [6.0, None, 6.0]
        assert pool.version.startswith("mine.py@") and pool.restarts == 1


def test_an_entry_point_changed_while_the_job_runs_fails_its_calls_loudly(code):
    (code / "moving.py").write_text("import os\ndef reward(p, r, a): return 1.0 if p != 'exit' else os._exit(1)")
    with RewardPool(Reward(entrypoint="moving:reward"), num_workers=1, search_path=code) as pool:
        (code / "moving.py").write_text("def reward(p, r, a):\n    return 0.0  # not the same code")
        results = pool.score([RewardCall(p, "3", None) for p in ("exit", "", "")])
        assert [r.reward for r in results] == [None, None, None]
        assert "changed while the job runs" in results[1].error
        assert pool.failures == {"crash": 1, "start": 2}


def test_versions_differ_by_parameters_alone(code):
    def version(**parameters):
        with RewardPool(Reward(name="fake", parameters=parameters), num_workers=1) as pool:
            return pool.version

    assert version(seed=1) == version(seed=1) != version(seed=2)


def test_a_mathematical_tower_costs_only_its_own_sample():
    reward = Reward(name="math", timeout_seconds=3)
    with RewardPool(reward, num_workers=1) as pool:
        tower = r"\boxed{" + "9^{9^{9^{9^{9}}}}" + "}"
        results = pool.score([RewardCall("q", r, "8") for r in (r"\boxed{8}", tower, r"\boxed{8}")])
        assert [r.reward for r in results][::2] == [1.0, 1.0]
        assert results[1].reward != 1.0


def test_trivial_calls_are_fast_and_long_texts_pass(code):
    with make_pool(code, timeout_seconds=30) as pool:
        assert pool.score([RewardCall("x" * 3_000_000, "5", "\ud800é")] * 3) == [RewardResult(Outcome.SCORED, 5.0)] * 3
        calls = [RewardCall("good", "1", "a" * 200)] * 2000
        pool.score(calls)
        best = min(timed(pool, calls) for _ in range(3))
        assert best < len(calls) / 5000


def timed(pool, calls) -> float:
    started = time.monotonic()
    pool.score(calls)
    return time.monotonic() - started


def test_the_example_of_the_how_to_runs(code):
    page = Path(__file__).parents[2] / "docs" / "how-to" / "custom-rewards.md"
    file, trial = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    (code / "my_reward.py").write_text(file)
    command = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(WORKLOADS)!r})\n{trial}"]
    output = subprocess.run(command, cwd=code, capture_output=True, text=True, timeout=30, check=True).stdout
    assert output.startswith("my_reward:reward@") and "reward=1.0" in output
    bad = Reward(entrypoint="my_reward:reward", parameters={"penalty": -1})
    with pytest.raises(UserError, match="must not be negative"):
        RewardPool(bad, num_workers=1, search_path=code)


def test_processes_that_end_at_once_in_two_workers_leave_the_pool_working(code):
    with make_pool(code, num_workers=2) as pool:
        results = pool.score([RewardCall("exit", str(i), None) for i in range(12)])
        assert [r.outcome for r in results] == [Outcome.FAILED] * 12
        assert between_neighbours(pool, "good").reward == 7.0
