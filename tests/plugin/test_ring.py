"""The ring: order, refusal when full, one producer against one consumer."""

import sys
import threading
import time

import numpy as np
from doublure_plugin.ring import Ring


def publish(ring: Ring, sequence: int) -> bool:
    slot = ring.claim()
    if slot is None:
        return False
    slot.sequence = sequence
    slot.rows[:] = sequence
    slot.count = ring.rows
    ring.publish()
    return True


def take(ring: Ring) -> int | None:
    slot = ring.peek()
    if slot is None:
        return None
    sequence = slot.sequence
    ring.release()
    return sequence


def test_frames_come_out_in_order() -> None:
    ring = Ring(4, 8, 8)
    for lap in range(5):
        assert [publish(ring, lap * 3 + i) for i in range(3)] == [True] * 3
        assert [take(ring) for _ in range(3)] == [lap * 3 + i for i in range(3)]
    assert take(ring) is None


def test_a_full_ring_refuses_and_keeps_what_it_has() -> None:
    ring = Ring(3, 8, 8)
    assert [publish(ring, i) for i in range(5)] == [True, True, True, False, False]
    assert len(ring) == 3
    assert take(ring) == 0
    assert publish(ring, 9)
    assert [take(ring) for _ in range(4)] == [1, 2, 9, None]


def test_a_claimed_slot_is_invisible_until_it_is_published() -> None:
    ring = Ring(2, 8, 8)
    slot = ring.claim()
    assert slot is not None
    slot.sequence = 5
    assert ring.peek() is None
    ring.publish()
    assert ring.peek() is slot


def test_no_slot_is_ever_torn() -> None:
    ring = Ring(4, 64, 64)
    enough = 3000
    wrong: list[int] = []
    seen: list[int] = []
    done = threading.Event()

    def consume() -> None:
        while not done.is_set() or len(ring):
            slot = ring.peek()
            if slot is None:
                continue
            if not (slot.rows == slot.sequence).all():
                wrong.append(slot.sequence)
            seen.append(slot.sequence)
            ring.release()

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        consumer = threading.Thread(target=consume)
        consumer.start()
        accepted: list[int] = []
        deadline = time.monotonic() + 20
        sequence = 0
        while len(accepted) < enough and time.monotonic() < deadline:
            if publish(ring, sequence):
                accepted.append(sequence)
            else:
                time.sleep(0)
            sequence += 1
        done.set()
        consumer.join(20)
    finally:
        sys.setswitchinterval(interval)
    assert not wrong
    assert seen == accepted
    assert len(seen) == enough


def test_views_share_one_buffer_of_the_right_size() -> None:
    slot = Ring(1, 16, 10).slots[0]
    assert slot.rows.shape == (16, 6)
    assert len(slot.bytes) == slot.rows.nbytes
    assert {k: v.shape for k, v in slot.pixels.items()} == {
        ("f", 4): (10, 4),
        ("f", 3): (10, 3),
        ("e", 4): (10, 4),
        ("e", 3): (10, 3),
    }
    for view in (*slot.pixels.values(), slot.rows):
        assert np.shares_memory(view, np.frombuffer(slot.bytes, np.uint8))
