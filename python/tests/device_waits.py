"""What a GPU's tests ask of work that is only enqueued."""

from collections.abc import Callable

import torch


def assert_the_host_does_not_wait(layer: Callable[[], list[torch.Tensor]]) -> None:
    """Runs layer(), which returns gradients, once to warm up and three times with waiting forbidden: finite, and no memory is kept."""
    layer()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            gradients = layer()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(torch.isfinite(x.float()).all() for x in gradients)
    del gradients
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == before
