"""Comments, docstrings and pages use plain words and whole sentences.

Most readers are not native speakers, and read one sentence, not the page. The
forms below were hard to read. The better wording stands beside each.
"""

import ast
import io
import itertools
import re
import subprocess
import tokenize
from collections.abc import Iterator
from pathlib import Path

from tests.programs import ROOT

START = r"(?:^|(?<=[.!?:] ))"  # of a sentence
FORMS = {
    r"\b[Aa]new\b": '"again", or say what starts from nothing',
    r"\b(?:goes|go|went|comes|come) by\b": '"follows", "depends on", "uses"',
    r"\b[Ww]hoever\b": '"a caller who", "anyone who"',
    r"\bha(?:s|ve) it that\b": "say the fact itself",
    r"\bfor ever\b": '"without end", "until ..."',
    START + "(?:Of|Such|Those of) ": "begin with the subject",
    START + r"What [^.?!]*(?:[.!]|$)": "begin with the thing that is meant",
    # Few words after a preposition, without a comma and a verb.
    START + "(?:Among|Behind|Beside|By(?! default)|From|On|Those|Under|Without)"
    r"(?: (?!is|are|was|has|have|can|may|must|be)[\w-]+){1,4}\.(?= |$)": (
        "make it a sentence with a subject and a verb"
    ),
}

Paragraph = list[tuple[int, str]]  # Line numbers, and the words of each line.


def in_comments(lines: list[tuple[int, str, bool]]) -> Iterator[Paragraph]:
    """Joins comments: (line number, words, whether it has a line alone)."""
    paragraph: Paragraph = []
    for number, words, alone in lines:
        follows = bool(paragraph) and paragraph[-1][0] == number - 1 and alone
        if not (follows and words):
            yield paragraph
            paragraph = []
        paragraph.append((number, words))
    yield paragraph


def in_cc(text: str) -> Iterator[Paragraph]:
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        match = re.match(
            r"((?:[^\"/]|/(?!/)|\"(?:[^\"\\]|\\.)*\")*)//(.*)", line
        )
        if match:
            code, words = match.groups()
            found.append((number, words.strip(), not code.strip()))
    yield from in_comments(found)


def in_python(text: str) -> Iterator[Paragraph]:
    found = []
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            alone = not token.line[: token.start[1]].strip()
            words = token.string.lstrip("#: ")
            found.append((token.start[0], words, alone))
    yield from in_comments(found)
    for node in ast.walk(ast.parse(text)):
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            yield from in_page(node.value.value, node.lineno)


def in_page(text: str, first: int = 1) -> Iterator[Paragraph]:
    """Ends paragraphs at blank lines, items, cells and described arguments."""
    blank = re.sub(
        r"^ *```.*?^ *```$",
        lambda block: "\n" * block.group().count("\n"),
        text,
        flags=re.DOTALL | re.MULTILINE,
    )
    paragraph: Paragraph = []
    for number, line in enumerate(blank.splitlines(), first):
        words = line.strip()
        if not words or re.match(r"[*|#>-]|\d+\. |\w+: ", words):
            yield paragraph
            paragraph = []
        for cell in re.split(r" \| ", words.strip("| ")):
            if "|" in words and paragraph:
                yield paragraph
                paragraph = []
            cell = re.sub(r"^(?:[*>-]+|\d+\.|\w+:) ", "", cell)
            paragraph.append((number, cell))
    yield paragraph


def problems(path: str) -> Iterator[str]:
    text = (ROOT / path).read_text(encoding="utf-8")
    kind = {".md": in_page, ".py": in_python}.get(Path(path).suffix, in_cc)
    for paragraph in kind(text):
        whole = " ".join(words for _, words in paragraph)
        lengths = itertools.accumulate(len(words) + 1 for _, words in paragraph)
        ends = [
            (n, end) for (n, _), end in zip(paragraph, lengths, strict=True)
        ]
        # Names of code may have any words.
        whole = re.sub(r"`[^`]*`", lambda name: "x" * len(name.group()), whole)
        for form, better in FORMS.items():
            for match in re.finditer(form, whole):
                line = next(n for n, end in ends if match.start() < end)
                yield f'{path}:{line}: "{match.group()}": {better}'


def test_texts_have_none_of_the_forms_that_are_hard_to_read() -> None:
    listed = subprocess.run(
        ["git", "ls-files", "*.cc", "*.h", "*.md", "*.proto", "*.py"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    found = [
        problem for path in listed.stdout.split() for problem in problems(path)
    ]
    assert not found, "\n" + "\n".join(found)
