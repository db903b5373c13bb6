"""Memory of results is used again, and never while somebody holds the result."""

from __future__ import annotations

import threading

import torch

from onnxtool.torch_backend.run.result_memory import ResultMemory


def test_memory_is_free_again_when_the_last_view_is_gone() -> None:
    """Until then, another result has other memory."""
    memory = ResultMemory()
    first = memory.allocate((3, 4), torch.float32)
    address, view = first.data_ptr(), first.t()[1:]
    del first
    assert memory.allocate((3, 4), torch.float32).data_ptr() != address
    held = memory.allocate((3, 4), torch.float32)
    del view
    assert {memory.allocate((6,), torch.float64).data_ptr() for _ in range(2)} == {address}
    assert held.data_ptr() != address


def test_a_result_outlives_the_memory_that_it_is_from() -> None:
    """As a gradient outlives the compiled graph."""
    memory = ResultMemory()
    result = memory.allocate((1000,), torch.float32).fill_(7)
    del memory
    assert [torch.empty(1000).fill_(1) for _ in range(3)]
    assert result.eq(7).all()


def test_threads_never_share_a_result() -> None:
    """Each fills its own, and reads it again."""
    memory, wrong = ResultMemory(), []

    def work(number: int) -> None:
        for _ in range(300):
            result = memory.allocate((100,), torch.float32).fill_(number)
            if not result.eq(number).all():
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
