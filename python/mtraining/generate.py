"""Continues text greedily with a Hugging Face checkpoint: sparse attention over the prompt, dense over the cache after it.

    python -m mtraining.generate --checkpoint DIR --prompt "def f(x):"
    python -m mtraining.generate --checkpoint DIR --input prompts.jsonl      an object a line with the key "text"

In:   a checkpoint folder with its tokenizer, text. Out: with --prompt the continuation; with --input a JSON object a line, "text" and
"output". Needs transformers 5. Errors: one line `mtraining: error: ..`, exit 2 for a user's mistake.
"""

import argparse
import json
import pathlib
import sys

from mtraining.command_line import Parser, reported
from mtraining.json_lines import read_json_lines


def main(arguments: list[str] | None = None) -> int:
    parser = Parser(
        prog="python -m mtraining.generate",
        description="Continues text greedily; sparse over the prompt, dense over the cache.",
    )
    parser.add_argument("--checkpoint", type=pathlib.Path, required=True)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--prompt", help="text to continue")
    source.add_argument("--input", type=pathlib.Path, help='JSON lines with the key "text"')
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument(
        "--attention", choices=("vertical_slash", "dense"), default="vertical_slash"
    )
    parser.add_argument("--p-vertical", type=float, default=0.9)
    parser.add_argument("--p-slash", type=float, default=0.9)
    options = parser.parse_args(arguments)

    def work() -> None:
        prompts = [options.prompt] if options.input is None else read_prompts(options.input)
        model, tokenizer = load(options)
        asked = [token_ids(model, tokenizer, p, options.max_new_tokens) for p in prompts]
        for prompt, ids in zip(prompts, asked, strict=True):
            output = continue_ids(model, tokenizer, ids, options.max_new_tokens)
            print(json.dumps({"text": prompt, "output": output}) if options.input else output)

    return reported(work)


def read_prompts(path: pathlib.Path) -> list[str]:
    """The "text" of each line. Errors: ValueError naming file and line; OSError."""
    return [row["text"] for _, row in read_json_lines(path, {"text": (str,)})]


def load(options: argparse.Namespace):
    """(model, tokenizer) of the folder. Errors: ValueError, OSError, ImportError."""
    if not (options.checkpoint / "config.json").is_file():
        raise ValueError(f"--checkpoint: {options.checkpoint} holds no config.json")
    if options.max_new_tokens < 1:
        raise ValueError(f"--max-new-tokens: expected at least 1, got {options.max_new_tokens}")
    import mtraining

    dense = options.attention == "dense"
    mtraining.hf.register(
        mtraining.Dense()
        if dense
        else mtraining.VerticalSlash(p_vertical=options.p_vertical, p_slash=options.p_slash)
    )
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = str(options.checkpoint)
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    model = AutoModelForCausalLM.from_pretrained(
        folder, local_files_only=True, attn_implementation=mtraining.hf.NAME
    )
    return model.eval(), tokenizer


def token_ids(model, tokenizer, prompt: str, max_new_tokens: int):
    """[1, tokens]. Errors: ValueError for a prompt without tokens, or with more than the model has room for."""
    ids = tokenizer(prompt, return_tensors="pt").input_ids
    if ids.numel() == 0:
        raise ValueError("the prompt has no tokens")
    room = model.config.max_position_embeddings
    if ids.shape[1] + max_new_tokens > room:
        raise ValueError(
            f"the prompt: expected at most max_position_embeddings - --max-new-tokens = {room - max_new_tokens} tokens, got "
            f"{ids.shape[1]}"
        )
    return ids


def continue_ids(model, tokenizer, ids, max_new_tokens: int) -> str:
    """The greedy continuation alone, without special tokens."""
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    out = model.generate(ids, max_new_tokens=max_new_tokens, do_sample=False, pad_token_id=pad)
    return tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)


if __name__ == "__main__":
    sys.exit(main())
