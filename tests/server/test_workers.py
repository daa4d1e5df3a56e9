"""Which pushes of which peers are valid in the latest view."""

from __future__ import annotations

import pytest
from msgspec import structs

from tests.server.rounds.test_tracker import KEY, make_held, peer_of
from tests.server.test_service import VIEW, WORKERS
from zenps.errors import ProtocolError
from zenps.server.workers import Workers
from zenps.wire.identity import identity_at

ELSEWHERE = structs.replace(WORKERS[0], rank=2, host="elsewhere", identity=peer_of(2))


@pytest.fixture
def workers() -> Workers:
    workers = Workers()
    workers.follow(structs.replace(VIEW, workers=(*WORKERS, ELSEWHERE), left=(1,)))
    return workers


def test_a_rank_has_left_once_a_view_says_so() -> None:
    workers = Workers()
    assert workers.follow(VIEW) == {}
    (said,) = workers.follow(structs.replace(VIEW, left=(1,))).items()
    assert said == (1, f"{WORKERS[1]} left the job; see the log there")


def test_a_peer_is_known_by_its_identity(workers: Workers) -> None:
    assert workers.peers == {rank: peer_of(rank) for rank in range(3)}
    assert workers.rank_of(peer_of(2)) == 2
    assert workers.name_of(peer_of(1)) == str(WORKERS[1])
    assert workers.rank_of(b"unknown") is None
    assert workers.name_of(b"\x01\x02") == "peer 0102"


def test_a_peer_that_is_not_in_the_view_any_more_is_unknown(workers: Workers) -> None:
    route, push = identity_at(1, b"secret"), make_held(2, KEY).push
    workers.recognise(peer_of(2), route)
    assert workers.is_of(push, route)
    workers.follow(VIEW)
    assert not workers.is_of(push, route)
    with pytest.raises(ProtocolError, match="push of rank 2 by another peer"):
        workers.check(push, peer_of(2))


def test_a_peer_pushes_for_its_own_rank(workers: Workers) -> None:
    push = make_held(0, KEY).push
    workers.check(push, peer_of(0))
    for other in (peer_of(1), b"unknown"):
        with pytest.raises(ProtocolError, match="push of rank 0 by another peer"):
            workers.check(push, other)


@pytest.mark.parametrize("stands_for", [(2,), (1, 2), (1, 1), (0,), (7,)])
def test_a_rank_stands_for_no_others_than_those_of_its_host(
    workers: Workers, stands_for: tuple[int, ...]
) -> None:
    workers.check(make_held(0, KEY, stands_for=(1,)).push, peer_of(0))
    with pytest.raises(ProtocolError, match="not others of its host"):
        workers.check(make_held(0, KEY, stands_for=stands_for).push, peer_of(0))


def test_a_peer_is_reached_by_one_connection_as_long_as_a_view_names_it(workers: Workers) -> None:
    route = identity_at(1, b"secret")
    workers.recognise(peer_of(2), route)
    workers.recognise(peer_of(2), route)
    with pytest.raises(ProtocolError, match=r"unexpected: a second connection of worker 2"):
        workers.recognise(peer_of(2), identity_at(2, b"secret"))
    assert workers.routes == {peer_of(2): route}
    workers.follow(structs.replace(VIEW, workers=(*WORKERS, ELSEWHERE)))
    assert workers.routes == {peer_of(2): route}
    workers.follow(VIEW)
    assert workers.routes == {}
