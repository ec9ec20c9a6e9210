"""Questions about code: which line defines a name, how far a definition goes, and that uses come after it."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_recall import WordTokenizer

from longchat_cli.documents import Document
from longchat_cli.evaluation.repository import definitions, repository
from longchat_cli.recall.definitions import LONGEST, Definitions, definition_range
from longchat_cli.recall.find import Finder
from longchat_cli.recall.passages import ReadingPlan

CODE = '''import shutil


def copy_all(source, target):
    """Copy every file."""

    def inner(name):
        return shutil.copy(source / name, target)

    return [
        inner(name)
        for name in source
    ]

# copy_all is used below
LIMIT = 3


class Copier:
    def run(
        self,
        source,
    ):
        copy_all(source, "x")
        copy_all(source, "y")
        return self.count
'''


@pytest.mark.parametrize(
    "line",
    [
        "def target(x):",
        "async def target(x):",
        "class target:",
        "class target(Base):",
        "export default function target(x) {",
        "pub(crate) fn target<T>(x: T) -> T {",
        "func (r *Reader) target(p []byte) (int, error) {",
        "type target struct {",
        "public static final class target extends Other {",
        "struct target",
        "#define target 5",
        "macro_rules! target {",
        "export interface target {",
        "data class target(val x: Int)",
        "def target",
        "module target",
    ],
)
def test_definitions_of_many_languages(line: str) -> None:
    found = Definitions(["target(5)", line, "print(target)", "import target"])
    assert found.score("Where is target defined?").tolist() == [0, 1, 0, 0]


@pytest.mark.parametrize("line", ["target = 5", "const target = () => 1;", "target: dict[str, int] = {}"])
def test_assignments_count_less(line: str) -> None:
    assert Definitions([line, "target == 5"]).score("Where is target defined?").tolist() == [0.5, 0]


@pytest.mark.parametrize(
    "sentence",
    [
        "type target into the box",
        "class target practice was fun",
        "He said: def not a target.",
        "sub target is near",
    ],
)
def test_prose_defines_nothing(sentence: str) -> None:
    assert not Definitions([sentence]).score("Where is the target defined?").any()


def test_words_of_english_count_in_questions_about_code_alone() -> None:
    found = Definitions(["def main():", "def parse_args():", "def getName():"])
    assert not found.score("What is the main idea?").any()
    assert found.score("What does main return?").tolist() == [1, 0, 0]
    assert found.score("How does parse_args work?").tolist() == [0, 1, 0]
    assert found.score("Tell me of getName.").tolist() == [0, 0, 1]
    assert not found.score("Where is getname defined?").any()


def test_a_definition_is_its_name_with_its_body() -> None:
    begin, end = definition_range(CODE, CODE.index("def copy_all"))
    assert CODE[begin:end].startswith("def copy_all")
    assert CODE[begin:end].endswith("    ]")
    begin, end = definition_range(CODE, CODE.index("def inner"))
    assert CODE[begin:end].endswith("target)")
    begin, end = definition_range(CODE, CODE.index("def run"))
    assert CODE[begin:end].endswith("return self.count")
    begin, end = definition_range(CODE, CODE.index("LIMIT"))
    assert CODE[begin:end] == "LIMIT = 3"


def test_braces_close_a_definition() -> None:
    text = "int add(int a)\n{\n    return a;\n}\nint other()\n{\n}\n"
    begin, end = definition_range("function f() {\n  return 1;\n}\nf();\n", 0)
    assert end == len("function f() {\n  return 1;\n}")
    assert definition_range(text, 0)[1] == len("int add(int a)")  # nothing is promised for this style


def test_an_endless_definition_is_cut_at_whole_lines() -> None:
    text = "def long():\n" + "    x = 1\n" * 1000
    begin, end = definition_range(text, 0)
    assert end - begin <= LONGEST
    assert text[end] == "\n"


def test_the_finder_puts_definitions_before_uses() -> None:
    uses = "".join(f"copy_all(source_{i}, target)  # where copy_all is defined and used\n" for i in range(40))
    documents = [Document("use.py", uses), Document("code.py", CODE), Document("more.py", uses)]
    finder = Finder(documents, WordTokenizer())
    (passage,) = finder.read("Where is copy_all defined?", 1000, ReadingPlan())
    assert passage.source == "code.py"
    place = documents[1].locate(passage.begin, passage.end)
    assert (place.line, place.end_line) == (4, 13)


def test_repository_questions_come_from_the_syntax_tree(tmp_path: Path) -> None:
    (tmp_path / "code.py").write_text(CODE)
    (tmp_path / "broken.py").write_text("def broken(:\n")
    (tmp_path / "two.py").write_text("def other_one():\n    return 1\n\n\ndef inner():\n    return 2\n")
    found = {d.name: d for d in definitions([Document("code.py", CODE)])}
    assert (found["copy_all"].line, found["copy_all"].end_line, found["copy_all"].returns) == (4, 13, (10,))
    assert "run" not in found  # too short to be asked about
    assert found["Copier"].returns == ()

    def find(texts, questions):
        places = {d.name: [(d.source, d.line, d.line)] for d in definitions(texts)}
        return [next(p for name, p in places.items() if name in question) for question in questions]

    result = repository(20, 0, [tmp_path], find)
    asked = {sample["name"] for sample in result["samples"]}
    assert asked == {"copy_all", "Copier", "other_one"}  # `inner` is defined twice
    where, returns = result["totals"]
    assert (where["correct"], where["n"]) == (3, 3)
    assert (returns["correct"], returns["n"], returns["statement_first"]) == (2, 2, 0)
    nothing = repository(20, 0, [tmp_path], lambda texts, questions: [[("use.py", 1, 99)] for _ in questions])
    assert nothing["totals"][0]["correct"] == 0
