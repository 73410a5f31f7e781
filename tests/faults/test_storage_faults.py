"""A whole run over an S3 server that fails: errors, resets, lost replies, an outage. Nothing lost, nothing twice."""

import os
import signal
import time

import pytest
from support.audit import audit, weights_differ
from support.fault_proxy import FaultProxy
from support.processes import cluster, job_for

from tba.contracts.records import RunState

ERRORS = [("error", 500), ("error", 503), ("reset", 503), ("lost_reply", 503)]


@pytest.mark.timeout(600)
def test_a_run_over_ten_percent_storage_errors_ends_complete_and_loses_nothing(tmp_path, s3_server, s3_uri, s3_env):
    with FaultProxy(s3_server.endpoint, seed=3) as proxy:
        for kind, status in ERRORS:
            proxy.add(kind, rate=0.025, status=status)
        job = job_for(tmp_path, s3_uri, objective={"totalSteps": 100000}, sync={"pollIntervalSeconds": 0.3})
        with cluster(tmp_path, job, env={**s3_env, "AWS_ENDPOINT_URL_S3": proxy.endpoint}) as run:
            searcher, trainer = run.searcher(), run.trainer()
            run.wait_for(lambda latest: latest.step >= 60, timeout_seconds=240)
            assert run.stop(searcher) == [143], run.tail()
            time.sleep(5)
            assert run.stop(trainer) == [143], run.tail()
            result = audit(run.store)
            print(f"faults {dict(proxy.injected)}, ids {sum(result.in_bucket.values())}")
            assert sum(proxy.injected.values()) >= 20
            assert result.lost == set() and result.doubled == set()
            assert weights_differ(run.store) == []


@pytest.mark.timeout(600)
def test_an_outage_of_thirty_seconds_is_waited_out_by_everybody(tmp_path, s3_uri, s3_env, s3_server):
    with FaultProxy(s3_server.endpoint) as proxy:
        job = job_for(
            tmp_path,
            s3_uri,
            objective={"totalSteps": 60},
            buffer={"maxReplayRatio": 1.0},
            sync={"pollIntervalSeconds": 0.3},
        )
        with cluster(tmp_path, job, env={**s3_env, "AWS_ENDPOINT_URL_S3": proxy.endpoint}) as run:
            run.searcher()
            trainer = run.trainer()
            run.wait_for(lambda latest: latest.step >= 10, timeout_seconds=120)
            os.kill(s3_server.pid, signal.SIGSTOP)  # connections hang: the worst kind of outage
            try:
                time.sleep(30)
                assert trainer.poll() is None
            finally:
                os.kill(s3_server.pid, signal.SIGCONT)
            assert trainer.wait(240) == 0, run.tail()
            assert run.latest().state is RunState.COMPLETE
            assert audit(run.store).doubled == set()
