"""Arguments of the operators for torch's opcheck, on any device; torch_ops_test.py and cuda_torch_test.py check with them."""

import torch

import mtraining
from python.tests.block_cases import as_lists, random_blocks
from python.tests.dense_reference import structured

NAMES = ("build_index", "attend", "attend_backward", "recall", "index_mask", "index_pairs")
BLOCK_NAMES = (
    "attend_blocks",
    "attend_blocks_backward",
    "block_bits_of_mask",
    "block_bits_of_lists",
    "longest_block_list",
    "choose_xattention",
    "choose_moba",
)
PATTERN = mtraining.VerticalSlash(p_vertical=0.3, p_slash=0.3, dense_threshold=1.0)
CAPPED = mtraining.VerticalSlash(max_columns=9, sink_tokens=4)


def operator_samples(name: str, device: str, length: int, head_dim: int, plain: torch.dtype):
    """Tuples of arguments of an operator: without documents in `plain`, with them in bf16, with a cap in `plain`.

    Two samples of `length` tokens, 4 query heads on 2; documents of 2/5 of the length.
    """
    ops = mtraining.library.ops
    block = 2 * length // 5
    positions = torch.arange(length, dtype=torch.int32, device=device)
    documents = (positions // block * block).expand(2, length).contiguous()
    for starts, pattern, dtype in (
        (None, PATTERN, plain),
        (documents, PATTERN, torch.bfloat16),
        (None, CAPPED, plain),
    ):
        q, k, v = (x.to(device) for x in structured(2, length, 4, 2, head_dim, dtype=dtype))
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


def block_samples(name: str, device: str, length: int, head_dim: int, plain: torch.dtype):
    """The same of the operators of single blocks: blocks of 64 without documents in `plain`, of 128 with them in bf16."""
    ops = mtraining.library.ops
    positions = torch.arange(length, dtype=torch.int32, device=device)
    documents = (positions // 40 * 40).expand(2, length).contiguous()
    for starts, size, dtype in ((None, 64, plain), (documents, 128, torch.bfloat16)):
        q, k, v = (x.to(device) for x in structured(2, length, 4, 2, head_dim, dtype=dtype))
        mask = random_blocks(2, 4, length, size)
        bits, unit = ops.block_bits_of_mask(mask.to(device)), size // 64
        if name == "block_bits_of_mask":
            yield (mask.to(device),)
        elif name == "block_bits_of_lists":
            yield tuple(x.to(device) for x in as_lists(mask))
        elif name == "longest_block_list":
            yield (bits, unit, unit, length)
        elif name == "choose_xattention":
            yield (q, k, starts, 0.0, 64, 16, 0.9)
        elif name == "choose_moba":
            yield (q, k, starts, 64, 2)
        else:
            q, k, v = (x.detach().clone().requires_grad_() for x in (q, k, v))
            attend = (q, k, v, bits, unit, unit, 10**4, starts, 0.0)
            if name == "attend_blocks":
                yield attend
                continue
            attended = [x.detach() for x in ops.attend_blocks(*attend)]
            grad = torch.randn(q.shape).to(q)
            yield (grad, *(x.detach() for x in (q, k, v)), *attended, *attend[3:])
