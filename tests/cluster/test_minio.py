"""hack/minio.yaml gives what it promises: an S3 server with the bucket `tba`, under restricted pod security."""

import secrets

import pytest
from support.kube_cluster import ClusterError
from support.probe_pods import job


def test_the_bucket_takes_and_gives_objects(storage):
    with storage.store(f"s3://tba/{secrets.token_hex(4)}") as store:
        store.put_once("a/b", b"some bytes")
        assert store.get("a/b").data == b"some bytes"
        assert [entry.key for entry in store.list_after("a/")] == ["a/b"]


def test_it_answers_by_the_name_that_the_examples_use(storage, cluster, namespace):
    cluster.apply(job("client", "get", "http://minio.minio.svc:9000/minio/health/ready"), namespace=namespace)
    cluster.kubectl("-n", namespace, "wait", "--for=condition=Complete", "job/client", "--timeout=60s")
    assert cluster.kubectl("-n", namespace, "logs", "job/client").split()[1] == "200"


def test_its_namespace_admits_restricted_pods_only(storage, cluster):
    with pytest.raises(ClusterError, match="violates PodSecurity"):
        cluster.kubectl("-n", "minio", "run", "loose", "--image=tba/probe:test")
