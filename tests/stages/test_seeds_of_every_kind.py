"""A directory of the files that people have, through seeds and generate: every kind and every form
becomes text.
"""

from __future__ import annotations

import gzip
import json
from collections import Counter

import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.parquet as pq
from rich.console import Console

from pipeline.artifacts.seed_rows import SeedRow
from pipeline.flow import run_flow
from pipeline.storage.shards import read_rows

CALLING = """{% for m in messages %}{{ '<|' + ('user' if m.role == 'tool' else m.role) + '|>' + m.content }}\
{% for call in m.tool_calls or [] %}{{ call.function.name + (call.function.arguments | tojson) }}{% endfor %}\
{{ eos_token }}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"""  # noqa: E501


def chat(n: int) -> list[dict]:
    return [
        {"role": "user", "content": f"red cat {n}?"},
        {"role": "assistant", "content": "blue dog"},
    ]


def weather(n: int) -> dict:
    call = json.dumps({"name": "moon", "arguments": {"n": n}})
    said = (
        ("human", f"old moon {n}?"),
        ("function_call", call),
        ("observation", f"[{n}]"),
        ("gpt", "green"),
    )
    return {"conversations": [{"from": who, "value": text} for who, text in said], "tools": "[]"}


def lines(rows) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def test_every_kind_of_file_in_one_directory_becomes_text_and_what_functions_say_is_learned_by_no_head(  # noqa: E501
    make_config, tmp_path
):
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "alpaca.json").write_text(
        json.dumps(
            [{"instruction": f"sing {n}", "input": "why", "output": "how"} for n in range(10)]
        )
    )
    (folder / "tools.jsonl").write_text(lines(weather(n) for n in range(10)))
    (folder / "chats.ndjson.gz").write_bytes(
        gzip.compress(lines({"messages": chat(n)} for n in range(10)).encode())
    )
    (folder / "faq.csv").write_text(
        "prompt,response\n" + "".join(f'"what {n}, and how?",old\n' for n in range(10))
    )
    (folder / "faq.tsv").write_text(
        "prompt\tresponse\n" + "".join(f"river {n}?\tstone\n" for n in range(10))
    )
    pq.write_table(
        pa.table({"messages": [chat(n) for n in range(10, 20)]}), folder / "chats.parquet"
    )
    feather.write_feather(
        pa.table({"messages": [chat(n) for n in range(20, 30)]}), folder / "chats.arrow"
    )
    settings = {"seeds__sources": [{"path": str(folder)}], "target__chat_template": CALLING}
    passthrough = {"generate__mode": "passthrough", "generate__engine": "vllm"}  # needs no engine
    config = make_config(tmp_path, **settings, **passthrough)
    run = run_flow(config, until="generate", executor="inline", console=Console(quiet=True))
    seeds = [SeedRow.of(row) for path in run.latest("seeds").shards() for row in read_rows(path)]
    assert len(seeds) == 70 and run.latest("seeds").summary["tool_rows"] == 10
    (source,) = run.latest("seeds").summary["sources"]
    assert {file["name"]: file["rows"] for file in source["read"]} == {
        file.name: 10 for file in folder.iterdir()
    }
    rows = [row for path in run.latest("generate").shards() for row in read_rows(path)]
    assert len(rows) == 70 and all(len(row["spans"]) == 1 for row in rows)
    assert Counter(len(row["messages"]) for row in rows) == {2: 60, 4: 10}
    for row in rows:
        (span,) = row["spans"]
        assert span["end"] - span["start"] <= len("blue dog") + 1, (
            "the answer alone, and its end of turn"
        )
