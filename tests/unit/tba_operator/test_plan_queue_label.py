"""A job with a queue label keeps it to itself: Kueue would take a child that has one for a job of its own."""

from support.job_world import SETTINGS, World

from tba_operator.api import QUEUE_LABEL, Images
from tba_operator.manifests import all_children


def test_no_child_of_a_queued_job_carries_its_queue_label():
    job = World.of(labels={QUEUE_LABEL: "team"}).job
    assert job.queue == "team"
    children = all_children(job, SETTINGS, Images(trainer="trainer:1", searcher="searcher:1"))
    templates = [child["spec"]["template"] for child in children if child["kind"] in ("StatefulSet", "Job")]
    assert len(templates) == 2
    assert not [made for made in (*children, *templates) if QUEUE_LABEL in made["metadata"]["labels"]]
