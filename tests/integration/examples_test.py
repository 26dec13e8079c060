"""Each example as a user runs it, and the snippets of the documents."""

import gzip
import os
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.programs import ROOT, environment, run_python
from tests.support import ServerProcess

EXAMPLES = ROOT / "examples"

# All but those that leave files behind or need a server, with their own tests.
PAGES_WITH_PROGRAMS = {
    f"docs/{page.name}"
    for page in (ROOT / "docs").glob("*.md")
    if re.search("^import tfswitch", page.read_text("utf-8"), re.MULTILINE)
} - {"docs/checkpoint_format.md", "docs/from_zero_to_served.md"}


def run(
    program: str | Path,
    *arguments: str | Path,
    stdin: str = "",
    cwd: Path = ROOT,
) -> str:
    """Runs a Python program; returns what it printed."""
    return run_python(program, *arguments, input=stdin, cwd=cwd).stdout


def number(pattern: str, output: str) -> float:
    """Returns the number that the group of a pattern matched."""
    found = re.search(pattern, output)
    assert found, f"no {pattern!r} in:\n{output}"
    return float(found[1])


def snippet(document: str, containing: str) -> str:
    """Returns the one Python block of a document with that text."""
    text = (ROOT / document).read_text(encoding="utf-8")
    blocks = [
        block
        for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL)
        if containing in block
    ]
    assert len(blocks) == 1, f"{document}: {len(blocks)} with {containing!r}"
    return blocks[0]


def criteo_lines(count: int, seed: int) -> str:
    """Lines in Criteo's format; the first string decides the label, mostly."""
    print(f"seed {seed}")
    draw = random.Random(seed)
    lines = []
    for _ in range(count):
        kind = draw.randrange(4)
        label = int(draw.random() < (0.9 if kind == 0 else 0.1))
        integers = [
            "" if draw.random() < 0.3 else str(draw.randrange(-2, 10_000))
            for _ in range(13)
        ]
        strings = [
            "" if draw.random() < 0.1 else f"{draw.getrandbits(32):08x}"
            for _ in range(25)
        ]
        cells = [str(label), *integers, f"{kind:08x}", *strings]
        lines.append("\t".join(cells) + "\n")
    return "".join(lines)


def test_quickstart_learns_and_prints_a_row() -> None:
    output = run(EXAMPLES / "quickstart.py")

    assert "500 ids have got a row" in output
    *_, last_auc = re.findall(r"val_AUC: ([0-9.]+)", output)
    assert float(last_auc) > 0.95


def test_ctr_pipeline_predicts_alike_after_save_and_export() -> None:
    output = run(EXAMPLES / "ctr_pipeline.py", "--epochs=1")

    assert "predictions of the loaded model are the same: True" in output
    assert "predictions of the exported model are the same: True" in output


def test_readme_shows_the_quickstart_program() -> None:
    program = (EXAMPLES / "quickstart.py").read_text(encoding="utf-8")

    shown = snippet("README.md", "model.fit")

    assert program.endswith("\n\n" + shown)
    assert len(shown.splitlines()) <= 20


def test_movielens_in_this_process_learns_saves_and_loads(
    tmp_path: Path,
) -> None:
    program = EXAMPLES / "deepfm_movielens.py"
    data = ("--max_ratings=5000", "--epochs=1")

    output = run(program, f"--save_dir={tmp_path}", *data)

    same = "predictions of the loaded model differ by at most 0.0e+00"
    assert same in output
    assert number(r"AUC with tfswitch: (\S+)", output) > 0.55


@pytest.mark.slow
def test_movielens_demo_on_servers_saves_loads_and_compares() -> None:
    output = run(
        EXAMPLES / "deepfm_movielens.py",
        "--demo",
        "--max_ratings=5000",
        "--epochs=1",
    )

    assert "shard 1 of 2 serving on" in output
    assert "shard 2 of 3 serving on" in output
    assert "predictions of the loaded model differ by at most 0.0e+00" in output
    assert abs(number(r"difference ([-+]0\.\d+)", output)) <= 0.003
    assert "What to do next" in output


def test_next_item_beats_popularity() -> None:
    output = run(
        EXAMPLES / "next_item_movielens.py",
        "--max_users=150",
        "--num_sampled=200",
        "--epochs=3",
        "--loss=softmax",
        "--sampler=unigram",
    )

    popularity = number(r"popularity: .* MRR (\S+)", output)
    assert popularity > 0.01
    assert number(r"sampled \w+: .* MRR (\S+)", output) > popularity


def test_movielens_on_ray_counts_each_rating_once_in_each_epoch() -> None:
    output = run_python(
        EXAMPLES / "ray_movielens.py",
        "--servers=1",
        "--workers=2",
        "--max_ratings=4000",
        "--epochs=2",
        # Ray's processes would wait for those of other tests.
        env=environment(RAY_worker_niceness="0"),
    ).stdout

    assert number(r"AUC (\S+) on ratings", output) > 0.55
    assert number(r"; (\d+) samples of all workers", output) == 6400


def test_criteo_stream_learns_from_files_and_the_standard_input(
    tmp_path: Path,
) -> None:
    plain = tmp_path / "day_0"
    plain.write_text(criteo_lines(3000, seed=1))
    packed = tmp_path / "day_1.gz"
    packed.write_bytes(gzip.compress(criteo_lines(2000, seed=2).encode()))

    output = run(
        EXAMPLES / "criteo_stream.py",
        plain,
        packed,
        "-",
        "--batch_size=100",
        "--report_every=25",
        stdin=criteo_lines(950, seed=3),
    )

    reports = re.findall(
        r"(\d+) batches: AUC ([0-9.]+), log loss ([0-9.]+); (\d+) rows", output
    )
    assert [int(report[0]) for report in reports] == [25, 50, 60]
    assert float(reports[-1][1]) > 0.7
    assert int(reports[0][3]) < int(reports[-1][3])


def test_criteo_stream_reads_real_lines() -> None:
    data = Path(os.environ.get("TFSWITCH_DATA", ROOT.parent / "shared/data"))
    file = data / "criteo_10k" / "criteo_10k.tsv.gz"
    if not file.is_file():
        pytest.skip(f"no {file}; set TFSWITCH_DATA to the folder of the data")

    output = run(EXAMPLES / "criteo_stream.py", file)

    assert number(r"20 batches: AUC ([0-9.]+)", output) > 0.55
    assert number(r"; (\d+) rows", output) > 40_000


def test_stream_of_days_keeps_fewer_rows_where_it_is_told_to() -> None:
    output = run(EXAMPLES / "stream_days.py", "--max_ratings=6000")

    end = r"{}: AUC (0\.\d+) .* (\d+) rows and"
    scores, rows = {}, {}
    for arm in ("keep", "count", "two_stage"):
        found = re.search(end.format(arm), output)
        assert found, output
        scores[arm], rows[arm] = float(found[1]), int(found[2])
    # All ids, of which the others keep less than a half.
    assert rows["keep"] == number(r"days, (\d+) ids", output)
    assert rows["count"] < rows["keep"] / 2
    assert rows["two_stage"] < rows["keep"] / 2
    assert min(scores.values()) > 0.58
    assert max(scores.values()) - min(scores.values()) < 0.02


def test_stream_of_days_refuses_an_arm_that_it_does_not_know() -> None:
    with pytest.raises(AssertionError, match="keep, count or two_stage"):
        run(EXAMPLES / "stream_days.py", "--arms=keep,lose")


@pytest.mark.parametrize("document", sorted(PAGES_WITH_PROGRAMS))
def test_documented_programs_print_what_the_page_shows(
    document: str, tmp_path: Path
) -> None:
    text = (ROOT / document).read_text(encoding="utf-8")
    # A program that imports is whole; the block after it is its output.
    programs = re.findall(
        r"```python\n((?:(?!```).)*?^import tfswitch.*?)```\n\n"
        r"(?:```\n(.*?)```)?",
        text,
        re.DOTALL | re.MULTILINE,
    )

    assert any(expected for _, expected in programs)
    for program, expected in programs:
        # A program may read files that an earlier one has written.
        output = run("-c", program, cwd=tmp_path)
        if expected:
            assert output == expected


def test_page_from_zero_to_served_publishes_a_version_and_a_delta(
    tmp_path: Path,
) -> None:
    text = snippet("docs/from_zero_to_served.md", "import tfswitch")
    program = tmp_path / "train.py"
    with ServerProcess(flags=(f"--data_dir={tmp_path}/data",)) as server:
        text = text.replace("127.0.0.1:7077", server.address)
        program.write_text(text.replace("20_000", "2_000"))

        run(program, "1", "version", cwd=tmp_path)
        output = run(program, "2", "delta", cwd=tmp_path)

    assert re.search(r"^delta 2: \d+ rows, 0 removed$", output, re.MULTILINE)
    exports = tmp_path / "models" / "1" / "assets.extra" / "tfswitch"
    assert (exports / "delta-00000002").is_dir()


def test_checkpoint_snippet_reads_a_saved_table(tmp_path: Path) -> None:
    """The document saves two rows to `checkpoint` and reads them."""
    program = "".join(
        snippet("docs/checkpoint_format.md", containing)
        for containing in ("table.save", "safetensors")
    )

    assert "7 [1. 2.]" in run("-c", program, cwd=tmp_path)


def test_wire_protocol_snippets_place_keys_and_exchange_rows(
    tmp_path: Path,
) -> None:
    page = "docs/wire_protocol.md"
    document = (ROOT / page).read_text(encoding="utf-8")

    for line in run("-c", snippet(page, "def hash_key")).splitlines():
        assert line in document

    commands = re.search(
        r"```bash\n(python -m grpc_tools.*?)```", document, re.DOTALL
    )
    assert commands
    subprocess.run(
        ["bash", "-ec", commands[1].replace("python", sys.executable, 1)],
        cwd=ROOT,
        env=environment(OUT=str(tmp_path)),
        check=True,
    )
    client = tmp_path / "client.py"  # In the folder of its imports.
    client.write_text(snippet(page, "import grpc"))
    with ServerProcess() as server:
        assert run(client, server.address) in document
