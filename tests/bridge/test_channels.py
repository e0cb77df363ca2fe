"""Addresses, sockets and liveness."""

import time
from collections.abc import Iterator

import pytest
import zmq
from doublure_bridge import (
    AddressError,
    Dealer,
    Heartbeat,
    Liveness,
    Received,
    Router,
    decode,
    encode,
    parse_address,
)

BEAT = Heartbeat(session=b"", sequence=1, reply=False)


@pytest.fixture
def context() -> Iterator[zmq.Context]:
    with zmq.Context() as context:
        yield context


def wait_for(end: Router | Dealer, seconds: float = 5.0) -> Received:
    assert end.raw.poll(int(seconds * 1000)), "nothing arrived"
    received = end.recv()
    assert received is not None
    return received


def send_until(end: Dealer, seconds: float = 5.0) -> None:
    """Send once connected; `immediate` refuses before."""
    deadline = time.monotonic() + seconds
    while not end.send(BEAT):
        assert time.monotonic() < deadline, "never connected"
        time.sleep(0.01)


def test_both_directions(context: zmq.Context) -> None:
    with Router(context, "tcp://127.0.0.1:0") as router, Dealer(context, router.endpoint) as dealer:
        send_until(dealer)
        received = wait_for(router)
        assert decode(received.parts) == BEAT
        assert router.send(received.peer, BEAT)
        assert decode(wait_for(dealer).parts) == BEAT


def test_nothing_blocks_without_a_peer(context: zmq.Context) -> None:
    with Router(context, "tcp://127.0.0.1:0") as router:
        assert not router.send(b"nobody", BEAT)
        assert router.recv() is None
        endpoint = router.endpoint
    with Dealer(context, endpoint) as dealer:
        assert not dealer.send(BEAT)
        assert dealer.recv() is None


def test_a_reader_that_never_reads_only_fills_the_queue(context: zmq.Context) -> None:
    """Credit keeps this from happening; if it does, sending says so instead of blocking."""
    router = Router(context, "tcp://127.0.0.1:0", queue=2)
    with router, Dealer(context, router.endpoint, queue=2) as dealer:
        send_until(dealer)
        parts = [encode(BEAT)[0], bytes(1 << 20)]
        assert not all(dealer.send_parts(parts) for _ in range(200))


def test_a_dealer_reconnects_to_a_restarted_router(context: zmq.Context) -> None:
    first = Router(context, "tcp://127.0.0.1:0")
    with Dealer(context, first.endpoint) as dealer:
        send_until(dealer)
        wait_for(first)
        first.close()
        # Rebinding can meet the closing socket for a moment: closing is asynchronous in libzmq.
        deadline = time.monotonic() + 5
        while True:
            try:
                second = Router(context, first.endpoint)
                break
            except AddressError:
                assert time.monotonic() < deadline
                time.sleep(0.02)
        # What was queued as the old connection died is lost, so the peer repeats, as heartbeats do.
        with second:
            while not second.raw.poll(50):
                assert time.monotonic() < deadline
                dealer.send(BEAT)
            assert decode(wait_for(second).parts) == BEAT


def test_an_oversized_part_ends_the_connection_not_the_server(context: zmq.Context) -> None:
    router = Router(context, "tcp://127.0.0.1:0", max_part=1000)
    with router, Dealer(context, router.endpoint) as big, Dealer(context, router.endpoint) as good:
        send_until(big)
        wait_for(router)
        big.send_parts([bytes(100_000)])
        send_until(good)
        assert decode(wait_for(router).parts) == BEAT


def test_a_port_in_use_is_named(context: zmq.Context) -> None:
    with Router(context, "tcp://127.0.0.1:0") as router:
        with pytest.raises(AddressError) as caught:
            Router(context, router.endpoint)
        assert str(caught.value) == (
            f"cannot listen on {router.endpoint}: expected a free port, got a port in use; "
            "stop the program that holds it, or bind another port (port 0 picks one)"
        )


def test_closing_twice_is_fine_and_fast_with_an_unreachable_peer(context: zmq.Context) -> None:
    dealer = Dealer(context, "tcp://127.0.0.1:9")
    dealer.close()
    dealer.close()


@pytest.mark.parametrize(
    ("text", "endpoint"),
    [
        ("tcp://127.0.0.1:5570", "tcp://127.0.0.1:5570"),
        ("tcp://localhost:5570", "tcp://127.0.0.1:5570"),
        ("tcp://127.8.8.8:1", "tcp://127.8.8.8:1"),
        ("tcp://[::1]:5570", "tcp://[::1]:5570"),
        ("tcp://127.0.0.1:0", "tcp://127.0.0.1:*"),
        ("tcp://127.0.0.1:*", "tcp://127.0.0.1:*"),
    ],
)
def test_addresses(text: str, endpoint: str) -> None:
    assert parse_address(text).endpoint == endpoint


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("127.0.0.1:5570", "trainer address: expected tcp://HOST:PORT"),
        ("tcp://127.0.0.1", "trainer address: expected tcp://HOST:PORT"),
        ("tcp://127.0.0.1:70000", "trainer address: expected a port in 0..65535, got 70000"),
        ("ipc:///tmp/x", "trainer address: expected tcp://HOST:PORT"),
        ("tcp://0.0.0.0:5570", "trainer address: expected a loopback address"),
        ("tcp://gpu:5570", "trainer address: expected a loopback address"),
    ],
)
def test_bad_addresses(text: str, message: str) -> None:
    with pytest.raises(AddressError) as caught:
        parse_address(text)
    assert str(caught.value).startswith(message)


def test_liveness_follows_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    peer = Liveness(interval_s=0.5, timeout_s=2.0)
    assert peer.due()
    assert not peer.due()
    now += 0.6
    assert peer.due()
    assert peer.sequence == 2
    now += 1.5
    assert peer.lost
    peer.seen()
    assert not peer.lost
    assert peer.silent_s == 0


def test_a_socket_that_cannot_connect_is_closed(context: zmq.Context) -> None:
    with pytest.raises(zmq.ZMQError):
        Dealer(context, "tcp://127.0.0.1:*")
    context.term()  # would wait for a socket that is open
