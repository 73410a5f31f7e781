from types import SimpleNamespace

import pytest
import structlog

from tba.contracts.errors import StoreUnavailable, UserError
from tba.log import CONFIG_REFUSED, STORAGE_MOVED
from tba.relocation import RETRY_SECONDS, Follower, following
from tba.store.access import S3Location


def at(endpoint: str, ca: str | None = None) -> S3Location:
    return S3Location("b", "run", endpoint, "us-east-1", path_style=True, ca_bundle=ca)


OLD, NEW = at("http://old"), at("http://new")
OURS, OTHERS = SimpleNamespace(run_id="ours"), SimpleNamespace(run_id="others")


class World:
    """A store, the settings, and what there is at each location."""

    def __init__(self) -> None:
        self.location = OLD
        self.wanted: S3Location | Exception = OLD
        self.there: dict[S3Location, object] = {}
        self.run_id: str | None = "ours"
        self.contacts = 0
        self.now = 0.0
        self.follower = Follower(self, self._want, self._contact, run_id=lambda: self.run_id, clock=lambda: self.now)

    def relocate(self, location: S3Location) -> None:
        self.location = location

    def look(self) -> list[dict]:
        with structlog.testing.capture_logs() as logs:
            self.follower.look()
        return logs

    def _want(self) -> S3Location:
        if isinstance(self.wanted, Exception):
            raise self.wanted
        return self.wanted

    def _contact(self, location: S3Location):
        self.contacts += 1
        found = self.there.get(location)
        if isinstance(found, Exception):
            raise found
        return found


def test_unchanged_settings_send_nothing():
    world = World()
    assert world.look() == [] and (world.contacts, world.location) == (0, OLD)


def test_a_location_that_holds_the_run_is_moved_to_and_told_once():
    world = World()
    world.wanted, world.there[NEW] = NEW, OURS
    assert [(line["event"], line["endpoint"]) for line in world.look()] == [(STORAGE_MOVED, "http://new")]
    assert world.location == NEW
    assert world.look() == [] and world.contacts == 1


def test_another_ca_alone_is_another_location():
    world = World()
    renewed = at("http://old", ca="PEM")
    world.wanted, world.there[renewed] = renewed, OURS
    world.look()
    assert world.location == renewed


@pytest.mark.parametrize(
    ("found", "told"),
    [
        (OTHERS, "got the run others at s3://b/run of http://new"),
        (None, "got no run"),
        (UserError("InvalidAccessKeyId"), "InvalidAccessKeyId"),
        (StoreUnavailable("refused connection"), "refused connection"),
    ],
    ids=["another run", "empty", "refused", "silent"],
)
def test_a_location_that_is_no_good_changes_nothing_is_told_once_and_tried_again_later(found, told):
    world = World()
    world.wanted, world.there[NEW] = NEW, found
    (line,) = world.look()
    assert line["event"] == CONFIG_REFUSED and told in line["error"] and "stays where it was" in line["error"]
    assert world.look() == [] and world.contacts == 1
    world.now += RETRY_SECONDS
    assert world.look() == [] and world.contacts == 2 and world.location == OLD
    world.there[NEW] = OURS
    world.now += RETRY_SECONDS
    world.look()
    assert world.location == NEW


def test_a_correction_is_tried_at_once_and_an_undone_change_is_forgotten():
    world = World()
    wrong = at("http://wrong")
    world.wanted, world.there[NEW] = wrong, OURS
    world.look()
    world.wanted = OLD
    assert world.look() == []
    world.wanted = wrong
    assert len(world.look()) == 1
    world.wanted = NEW
    world.look()
    assert world.location == NEW


def test_settings_that_name_no_location_change_nothing():
    world = World()
    world.wanted = UserError("CA bundle /etc/tba/ca/ca.crt cannot be read")
    assert world.look()[0]["event"] == CONFIG_REFUSED
    assert world.look() == [] and world.location == OLD


def test_before_the_run_is_known_any_location_that_answers_will_do():
    world = World()
    world.run_id, world.wanted = None, NEW
    world.look()
    assert world.location == NEW


def test_a_store_in_a_directory_is_not_followed(local_store):
    with following(local_store, lambda: pytest.fail("no settings are asked for"), run_id=lambda: None):
        pass
