"""Nodes join rank 0 over a socket: who is let in, who is told what, and who holds nobody up."""

import queue
import socket
import threading
from contextlib import suppress

import pytest

from tba.contracts.errors import RanksMissing, UserError
from tba.trainer.interfaces import interface_of
from tba.trainer.nodelink import Hello, Link, Refused
from tba.trainer.nodes import Nodes

HOST, TOKEN = "127.0.0.1", "of the test"


class Scene:
    """Rank 0 among `num_nodes` nodes of two ranks, and what it was told."""

    def __init__(self, num_nodes: int) -> None:
        with socket.create_server(("", 0)) as free:
            self.port = free.getsockname()[1]
        self.told: queue.SimpleQueue[object] = queue.SimpleQueue()
        self.nodes = Nodes(num_nodes, 2, port=self.port, token=TOKEN, on_leave=self.told.put, on_loss=self.told.put)
        self.num_nodes = num_nodes
        self.links: list[Link] = []

    def join(self, node: int, token: str = TOKEN, **changes) -> Link:
        hello = {"nodes": self.num_nodes, "ranks": 2, **changes}
        self.links.append(Link.connect(HOST, self.port, token, Hello(node, **hello)))
        return self.links[-1]

    def close(self) -> None:
        self.nodes.close(1)
        for link in self.links:
            link.close()
        for thread in threading.enumerate():
            if thread.name == "node":
                thread.join(5)

    def gather(self, seconds: float = 10.0, stopping=lambda: False) -> bool:
        return self.nodes.gather(seconds=seconds, stopping=stopping)


@pytest.fixture
def scene():
    made: list[Scene] = []

    def make(num_nodes: int = 2) -> Scene:
        made.append(Scene(num_nodes))
        return made[-1]

    yield make
    for one in made:
        one.close()


def test_nodes_join_in_any_order_and_hear_where_the_store_is_and_how_it_ends(scene):
    found = scene(3)
    links = [found.join(2), found.join(1)]
    assert found.gather()
    found.nodes.welcome(1234)
    found.nodes.close(3)
    assert [link.receive() for link in links] == [{"store": 1234}] * 2
    assert [link.receive() for link in links] == [{"end": 3}] * 2
    assert found.nodes.own_host == links[0].peer_host == HOST


def test_another_token_is_refused_on_both_sides_and_does_not_count_as_a_node(scene):
    found = scene()
    with pytest.raises((Refused, ConnectionError)):
        found.join(1, token="another")
    with pytest.raises(RanksMissing, match=r"trainer nodes \[1\] of 2"):
        found.gather(0.3)


def test_a_node_does_not_take_somebody_else_for_rank_0():
    with socket.create_server((HOST, 0)) as listener:

        def impostor() -> None:
            connection, _ = listener.accept()
            with connection, suppress(OSError):
                connection.sendall(b'{"challenge": "00"}\n')
                connection.recv(65536)
                connection.sendall(b'{"proof": "00"}\n')

        thread = threading.Thread(target=impostor)
        thread.start()
        with pytest.raises(Refused):
            Link.connect(HOST, listener.getsockname()[1], TOKEN, Hello(1, 2, 2))
        thread.join()


@pytest.mark.parametrize("sent", [b"", b"GET / HTTP/1.1\r\n\r\n", b"[]\n", b"\xff\xfe\n", b"x" * 100_000])
def test_a_stranger_holds_nobody_up(scene, sent):
    found = scene()
    with socket.create_connection((HOST, found.port)) as stranger:
        stranger.sendall(sent)
        found.join(1)
        assert found.gather(5.0)


def test_a_node_that_comes_again_before_all_are_there_takes_the_place_of_its_former_self(scene):
    found = scene(3)
    former, latter = found.join(1), found.join(1)
    found.join(2)
    assert found.gather()
    with pytest.raises(OSError):
        former.receive()
    found.nodes.welcome(7)
    assert latter.receive() == {"store": 7}


def test_a_node_that_goes_before_all_are_there_is_waited_for_again(scene):
    found = scene(3)
    found.join(1).close()
    found.join(2)
    with pytest.raises(RanksMissing, match=r"\[1\]"):
        found.gather(1.0)
    assert found.told.empty()


def test_a_node_that_goes_when_all_were_there_is_a_loss(scene):
    found = scene()
    link = found.join(1)
    assert found.gather()
    link.close()
    assert "trainer node 1 is gone" in str(found.told.get(timeout=5))


def test_what_a_node_says_reaches_rank_0(scene):
    found = scene()
    link = found.join(1)
    assert found.gather()
    link.send({"leave": True})
    assert found.told.get(timeout=5) == 1
    link.send({"lost": "rank 3"})
    assert found.told.get(timeout=5) == "rank 3"


def test_nobody_is_let_in_after_all_have_joined(scene):
    found = scene()
    found.join(1)
    assert found.gather()
    with pytest.raises(OSError):
        found.join(1)


@pytest.mark.parametrize(
    "hello", [{"node": 1, "nodes": 3}, {"node": 1, "ranks": 4}, {"node": 2}, {"node": 1, "refusal": "too few GPUs"}]
)
def test_a_node_that_cannot_take_part_is_the_users_mistake(scene, hello):
    found = scene()
    link = found.join(hello.pop("node"), **hello)
    with pytest.raises(UserError, match=hello.get("refusal", "give all the same")):
        found.gather()
    found.nodes.close(UserError.exit_code)
    assert link.receive() == {"end": UserError.exit_code}


def test_gathering_ends_when_the_trainer_is_asked_to_stop(scene):
    assert not scene().gather(stopping=lambda: True)


def test_the_interface_of_an_address_is_found():
    assert interface_of("127.0.0.2") == interface_of("::1") == "lo"
    assert interface_of("192.0.2.1") is None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))  # sends nothing: the kernel chooses an address
        assert interface_of(probe.getsockname()[0]) in {name for _, name in socket.if_nameindex()}
