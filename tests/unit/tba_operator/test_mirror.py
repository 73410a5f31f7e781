import pytest
from support.raw_pods import raw_pod

from tba_operator.api import JOB_LABEL
from tba_operator.mirror import SETTLE_SECONDS, Mirror, Stream

KEY = ("default", "gsm8k")
STREAMS = {"tbajobs": Stream("TBAJob", None), "pods": Stream("Pod", None)}


def job(uid="job", name="gsm8k", **metadata):
    return {"kind": "TBAJob", "metadata": {"namespace": "default", "name": name, "uid": uid, **metadata}}


class Seen:
    """A mirror and whom it woke."""

    def __init__(self, streams=STREAMS):
        self.woken, self.waits = [], []
        self.mirror = Mirror(streams, self.wake)
        self.caches = self.mirror.caches

    def wake(self, key, may_wait):
        self.woken.append(key)
        self.waits.append(may_wait)

    def list(self, stream, *objects, first=True, last=True):
        """As kopf: a page is read, then its objects come as events."""
        self.mirror.page(stream, [raw["metadata"]["uid"] for raw in objects], first=first, last=last)
        for raw in objects:
            self.mirror.show(raw)

    @property
    def complete(self):
        return self.mirror.complete.is_set()


def seen(*jobs, pods=()):
    """All listed."""
    found = Seen()
    found.list("tbajobs", *jobs)
    found.list("pods", *pods)
    assert found.complete
    found.woken.clear()
    found.waits.clear()
    return found


def test_nobody_is_woken_before_all_kinds_were_listed_and_shown():
    found = Seen()
    found.list("tbajobs", job())
    found.mirror.page("pods", ["uid-a"], first=True, last=True)
    assert not found.complete and found.woken == []
    found.mirror.show(raw_pod("searcher", "a"))
    assert found.complete
    assert found.woken == [KEY]


def test_a_list_is_complete_with_its_last_page_only():
    found = Seen()
    found.list("tbajobs", job())
    found.list("pods", raw_pod("searcher", "a"), last=False)
    assert not found.complete
    found.list("pods", raw_pod("searcher", "b"), first=False)
    assert found.complete
    assert len(found.caches.pods(KEY)) == 2


def test_a_cluster_without_anything_is_complete():
    found = Seen()
    for stream in STREAMS:
        found.list(stream)
    assert found.complete and found.woken == []


def test_what_is_deleted_before_it_was_shown_is_awaited_no_more():
    found = Seen()
    found.list("tbajobs", job())
    found.mirror.page("pods", ["uid-a"], first=True, last=True)
    found.mirror.remove(raw_pod("searcher", "a"))
    assert found.complete


def test_an_object_that_cannot_be_read_holds_up_nobody():
    found = Seen()
    found.list("tbajobs", job())
    broken = raw_pod("searcher", "a")
    broken["status"] = "none"
    found.mirror.page("pods", ["uid-a"], first=True, last=True)
    with pytest.raises(AttributeError):
        found.mirror.show(broken)
    assert found.complete


def test_other_lists_are_nothing_to_it():
    found = Seen()
    found.mirror.page("namespaces", ["n"], first=True, last=True)
    assert not found.complete


def test_what_a_later_list_lacks_is_gone_and_its_job_woken():
    found = seen(job(), pods=[raw_pod("searcher", "here"), raw_pod("searcher", "gone")])
    found.list("pods", raw_pod("searcher", "here"))
    assert [pod.name for pod in found.caches.pods(KEY)] == ["here"]
    assert KEY in found.woken


def test_what_appeared_while_a_list_was_read_is_not_gone():
    found = seen(job())
    found.mirror.page("pods", [], first=True, last=False)
    found.mirror.show(raw_pod("searcher", "new"))
    found.mirror.page("pods", [], first=False, last=True)
    assert len(found.caches.pods(KEY)) == 1


def test_a_list_that_was_begun_again_counts_from_its_new_beginning():
    found = seen(job(), pods=[raw_pod("searcher", "a"), raw_pod("searcher", "b")])
    found.mirror.page("pods", ["uid-a"], first=True, last=False)
    found.mirror.page("pods", ["uid-b"], first=True, last=True)
    assert [pod.name for pod in found.caches.pods(KEY)] == ["b"]


def test_a_list_of_one_namespace_says_nothing_of_another():
    found = Seen({"pods in a": Stream("Pod", "a"), "pods in b": Stream("Pod", "b")})
    found.list("pods in a", raw_pod("searcher", "one", namespace="a"))
    found.list("pods in b", raw_pod("searcher", "two", namespace="b"))
    found.list("pods in a")
    assert found.caches.pods(("a", "gsm8k")) == []
    assert len(found.caches.pods(("b", "gsm8k"))) == 1


def test_a_job_that_is_gone_is_no_job():
    found = seen(job())
    found.mirror.remove(job())
    assert found.caches.job(KEY) is None
    assert found.woken == [KEY]


def test_a_pod_with_the_jobs_label_but_no_role_is_not_kept():
    found = seen(job())
    found.mirror.show(raw_pod(labels={"tba.dev/role": "other"}))
    assert found.caches.pods(KEY) == []


def test_children_are_kept_trimmed():
    metadata = {"namespace": "default", "name": "c", "uid": "c", "labels": {JOB_LABEL: "gsm8k"}, "managedFields": [{}]}
    found = seen(job())
    found.mirror.show({"kind": "ConfigMap", "metadata": metadata})
    [kept] = found.caches.children(KEY)
    assert "managedFields" not in kept["metadata"]


@pytest.mark.parametrize(
    "wish",
    [
        job(generation=2, labels={"a": "b"}),
        job(generation=1, labels={"a": "c"}),
        job(generation=1, labels={"a": "b"}, deletionTimestamp="2027-01-15T08:00:00Z"),
        job("namesake", generation=1, labels={"a": "b"}),
        job("new", "new"),
    ],
)
def test_what_somebody_wants_is_done_at_once(wish):
    found = seen(job(generation=1, labels={"a": "b"}))
    found.mirror.show(wish)
    assert found.waits == [0.0]


def test_a_status_and_pods_may_wait_a_moment():
    found = seen(job(generation=1))
    found.mirror.show(job(generation=1, resourceVersion="2"))
    found.mirror.show(raw_pod("searcher", "a"))
    found.mirror.remove(raw_pod("searcher", "a"))
    assert found.waits == [SETTLE_SECONDS] * 3
