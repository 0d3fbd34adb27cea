"""Every kind of file has the same records."""

from __future__ import annotations

import json

import datasets

from nxd_infer.recipes.data.sources import records

ROWS = [{"text": "one"}, {"text": "two"}]


def test_every_kind_of_file_has_the_same_records(tmp_path):
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (tmp_path / "b.json").write_text(json.dumps(ROWS))
    made = datasets.Dataset.from_list(ROWS)
    made.to_parquet(str(tmp_path / "c.parquet"))
    made.save_to_disk(str(tmp_path / "d"))
    datasets.DatasetDict({"train": made}).save_to_disk(str(tmp_path / "e"))
    (arrow,) = (tmp_path / "d").glob("*.arrow")
    for source in ("a.jsonl", "b.json", "c.parquet", "d", "e", f"d/{arrow.name}"):
        assert [dict(one) for one in records(tmp_path / source)] == ROWS, source
    (tmp_path / "texts").mkdir()
    for name, row in zip(("1.txt", "2.md"), ROWS, strict=True):
        (tmp_path / "texts" / name).write_text(row["text"])
    assert list(records(tmp_path / "texts")) == ROWS
