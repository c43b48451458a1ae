"""What README says of the proof is what benchmarks/proof.py wrote last, and all that it claims held there."""

from pathlib import Path

ROOT = Path(__file__).parent.parent
WRITTEN = (ROOT / "benchmarks" / "proof.md").read_text("utf-8")


def test_readmes_table_is_the_one_that_was_written() -> None:
    text = (ROOT / "README.md").read_text("utf-8")
    table = text.split("<!-- the table of benchmarks/proof.md -->\n")[1].split("<!-- end -->")[0]
    assert table.startswith("| arm |")
    assert WRITTEN.startswith(table)


def test_every_claim_held() -> None:
    claims = [line for line in WRITTEN.splitlines() if line.startswith("- ")]
    assert len(claims) > 30
    assert [line for line in claims if not line.startswith("- holds: ")] == []
