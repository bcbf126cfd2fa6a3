"""Arguments of the operators for torch's opcheck, on any device; torch_ops_test.py and cuda_torch_test.py check with them."""

from collections.abc import Iterator

import torch

import mtraining

NAMES = ("build_index", "attend", "attend_backward", "recall", "index_mask", "index_pairs")


def operator_samples(
    name: str, tensors, length: int, block: int, patterns, device: str
) -> Iterator[tuple]:
    """A tuple of arguments for each (pattern, dtype, whether in documents of `block` tokens) of `patterns`.

    tensors: dtype -> (q, k, v) of two samples of `length` tokens on the device.
    """
    ops = mtraining.library.ops
    positions = torch.arange(length, dtype=torch.int32, device=device)
    documents = (positions // block * block).expand(2, length).contiguous()
    for pattern, dtype, packed in patterns:
        starts = documents if packed else None
        q, k, v = tensors(dtype)
        if name == "build_index":
            yield (q, k, starts, 0.0, *pattern.arguments())
            continue
        lists = mtraining.build_index(q, k, pattern=pattern, document_starts=starts).lists()
        if name == "recall":
            yield (q, k, *lists, starts, 0.0, 64, "last", 8, 1)
        elif name == "index_mask":
            yield (*lists, starts, length)
        elif name == "index_pairs":
            yield (*lists, length)
        else:
            q, k, v = (x.detach().clone().requires_grad_() for x in (q, k, v))
            attend = (q, k, v, *lists, starts, 0.0)
            if name == "attend":
                yield attend
                continue
            attended = [x.detach() for x in ops.attend(*attend)]
            grad = torch.randn(q.shape).to(q)
            yield (grad, *(x.detach() for x in (q, k, v)), *attended, *lists, starts, 0.0)
