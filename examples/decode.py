"""Decode with an export: one prompt, a batch, a stream, and plain decoding for comparison.

    python examples/decode.py runs/demo/latest/export "How do I get to the town hall?" "Write a
    packing list."

The script prints whether the greedy text equals that of plain decoding, token for token.
"""

import sys

from pipeline import acceleration_rate, load_export

MAX_NEW_TOKENS = 64


def main(export: str, *questions: str) -> None:
    model = load_export(export)
    prompts = [model.target.prompt(question) for question in questions or ("Hello!",)]

    one = model.decoder.generate(prompts[0], MAX_NEW_TOKENS)
    print(f"one: {len(one.token_ids)} tokens in {one.num_steps} steps after the first")

    plain = model.target.decoder().generate(prompts[0], MAX_NEW_TOKENS)
    print(f"equal to plain decoding: {plain.token_ids == one.token_ids}")

    many = model.decoder.generate_batch(prompts, MAX_NEW_TOKENS)
    print(f"batch of {len(many)}: acceleration rate {acceleration_rate(many):.2f}")

    for piece in model.target.stream_text(model.decoder.stream(prompts[0], MAX_NEW_TOKENS)):
        print(piece, end="", flush=True)
    print()


if __name__ == "__main__":
    main(*sys.argv[1:])
