"""Answer sentences against documents: what is a quote, what only looks like one, and where it stands."""

from __future__ import annotations

import random
import time

import pytest

from longchat_cli import wording
from longchat_cli.citations import Checker
from longchat_cli.documents import Document
from longchat_cli.documents.document import Mark
from longchat_cli.evaluation.citing import citing, planted
from longchat_cli.prose import prose

STORY = """The Voyage

On 3 May 1851 Captain Harlow sold 1,250 barrels of tar to Mrs. Pell in Odessa, which
she had not expec-
ted. The captain’s son did not see the ship, and nobody believed that the mill burned.
It was not the cook who sighted the whale. Did the mate steal the compass?

“The sea-shore is ours,” said Pell to Harlow. The soldiers were attacked at dawn near
the old bridge. Harlow paid five thousand crowns. Interest is 4 per cent. If the wind
turns, the fleet sails. He hardly slept in Odessa. The price fell from 9 to 7 dollars.
The brother of the judge stole the letter. All the windows of the chapel were broken.
"""
CODE = '''def total(items, start=0):
    """Sum of the prices."""
    return start + sum(item.price for item in items if item.price != None)
'''


def verdict(answer: str, text: str = STORY) -> str:
    (citation,) = Checker([Document("story.txt", text)]).check(answer)
    return citation.verdict


@pytest.mark.parametrize(
    "sentence",
    [
        "On 3 May 1851 Captain Harlow sold 1,250 barrels of tar to Mrs. Pell in Odessa.",
        "captain harlow SOLD 1250 barrels of tar to mrs pell in odessa",
        "Captain Harlow sells 1,250 barrels of the tar to Mrs. Pell, in Odessa.",
        "According to the text, Captain Harlow sold 1,250 barrels of tar to Mrs. Pell.",
        "- **Captain Harlow sold 1,250 barrels of tar.**",
        "She hadn't expected.",
        "The captain's son didn't see the \"ship\".",
        "“The seashore is ours,” said Pell to Harlow.",
        "The sea shore is ours, said Pell to Harlow",
        "Soldiers were attacked at dawn near an old bridge.",
        "Interest is 4 percent.",
        "Interest is 4 %.",
        "He hardly slept in Odessa.",
        "The price falls from 9 to 7 dollars.",
        "All of the windows of the chapel were broken.",
        "The brother of the judge stole the letter.",
        "No, the captain's son did not see the ship.",
        "The answer is: 1250",
    ],
)
def test_quotes_and_light_paraphrases_are_verified(sentence: str) -> None:
    assert verdict(sentence) == "verified"


@pytest.mark.parametrize(
    "sentence",
    [
        "Captain Harlow sold 1,350 barrels of tar to Mrs. Pell in Odessa.",  # number
        "Captain Harlow sold 1,250 barrels of tar to Mrs. Pell in Galway.",  # place
        "Captain Pell sold 1,250 barrels of tar to Mrs. Harlow in Odessa.",  # roles
        "Captain Harlow never sold 1,250 barrels of tar to Mrs. Pell.",  # denied
        "Captain Harlow sold 1,250 tons of tar to Mrs. Pell.",  # unit
        "On 4 May 1851 Captain Harlow sold 1,250 barrels of tar.",  # date
        "She had expected.",
        "The captain's son saw the ship.",
        "The captain did not see the ship.",
        "The mill burned.",  # nobody believed it
        "The cook sighted the whale.",  # it was not he
        "The mate stole the compass.",  # was asked
        "Said Harlow to Pell.",
        "The soldiers attacked at dawn near the old bridge.",  # active for passive
        "Harlow paid five.",
        "Harlow paid thousand crowns.",
        "The fleet sails if the wind turns.",
        "The wind turns.",  # if
        "He slept in Odessa.",
        "The price fell to 9 from 7 dollars.",
        "The judge stole the letter.",  # his brother did
        "Some of the windows of the chapel were broken.",
        "The letter was stolen by the judge.",
        "The letter all the windows.",  # over the end of a sentence
        "Odessa.",  # is said twice
    ],
)
def test_altered_statements_are_not_verified(sentence: str) -> None:
    assert verdict(sentence) != "verified"


def test_terms_alone_are_a_mention_and_strange_ones_nothing() -> None:
    assert verdict("Mrs. Pell bought barrels of tar from Captain Harlow.") == "mentions"
    assert verdict("Mrs. Quill bought barrels of tar from Captain Harlow.") == "not found"  # a strange name
    assert verdict("Penguins migrate every winter.") == "not found"


def test_code_is_compared_with_its_operators() -> None:
    assert (
        verdict("return start + sum(item.price for item in items if item.price != None)", CODE) == "verified"
    )
    assert (
        verdict("return start + sum(item.price for item in items if item.price == None)", CODE) != "verified"
    )
    assert verdict("def total(items, start=1):", CODE) != "verified"


@pytest.mark.parametrize(
    "text",
    [
        "- Alice: engineer\n- Bob: doctor\n",
        "| Alice | engineer |\n| Bob | doctor |\n",
        "* Alice, engineer\n* Bob, doctor",
    ],
)
def test_rows_and_items_are_not_joined(text: str) -> None:
    assert verdict("Alice: engineer", text) == "verified"
    assert verdict("engineer Bob", text) != "verified"


def test_a_single_word_is_verified_where_it_stands_once() -> None:
    assert verdict("compass", STORY) == "mentions"  # it is asked about
    assert verdict("1851", STORY) == "verified"


def test_offsets_and_locations() -> None:
    first = Document("a.txt", "Nothing here.\n")
    book = Document("b.epub", "File: b\n\n" + STORY, header=9, marks=(Mark(0, "Chapter 1", 1),))
    answer = "Yes. The soldiers were attacked at dawn. Penguins fly."
    citations = Checker([first, book]).check(answer)
    assert [answer[c.begin : c.end] for c in citations] == [
        "Yes.", "The soldiers were attacked at dawn.", "Penguins fly."
    ]  # fmt: skip
    assert [c.verdict for c in citations] == ["not found", "verified", "not found"]
    found = citations[1].as_json(answer, [first, book])
    assert found["exact"] is True
    assert found["quote"]["text"] == "The soldiers were attacked at dawn"
    assert (found["quote"]["source"], found["quote"]["place"]) == ("b.epub", "Chapter 1")
    assert found["quote"]["line"] == STORY[: STORY.index("The soldiers")].count("\n") + 1
    assert book.text[found["quote"]["begin"] : found["quote"]["end"]] == found["quote"]["text"]
    assert citations[0].as_json(answer, [first, book])["quote"] is None


def test_near_quotes_are_told_from_exact_ones() -> None:
    checker = Checker([Document("story.txt", STORY)])
    for answer, exact in (
        ("the price fell from 9 to 7 dollars", True),
        ("Price falls from 9 to 7 dollars.", False),
    ):
        (citation,) = checker.check(answer)
        assert (citation.verdict, citation.exact) == ("verified", exact)


def test_of_equal_places_the_one_that_was_read_is_cited() -> None:
    text = "The mill has seven sails.\n\n" * 5
    checker = Checker([Document("note.txt", text)])
    (first,) = checker.check("The mill has seven sails.")
    (read,) = checker.check("The mill has seven sails.", [(0, 81, 106)])
    assert (first.source_begin, read.source_begin) == (0, 81)


def test_a_mention_in_what_was_read_goes_before_a_better_one() -> None:
    text = (
        "The miller, an old man, sold the mill to Pell.\n\n"
        + "It was late. " * 60
        + "Did Pell buy an old mill of the miller?"
    )
    checker = Checker([Document("note.txt", text)])
    answer = "Pell bought the mill of the old miller."
    (first,) = checker.check(answer)
    (read,) = checker.check(answer, [(0, 0, 47)])
    assert (first.verdict, read.verdict) == ("mentions", "mentions")
    assert first.source_begin > 60
    assert (read.source_begin, read.source_end) == (4, 45)


def test_nothing_to_check() -> None:
    assert Checker([]).check("The mill burned.")[0].verdict == "not found"
    assert Checker([Document("empty.txt", "")]).check("The mill burned.")[0].verdict == "not found"
    assert Checker([Document("story.txt", STORY)]).check("```\n***\n") == []


@pytest.mark.parametrize(
    "language",
    ["Кот не спит на крыше.", "猫は屋根で眠らない。", "Die Katze schläft nicht.", "Le café n’est pas fermé."],
)
def test_other_languages_are_compared_word_by_word(language: str) -> None:
    text = f"Before it. {language} After it."
    assert verdict(language, text) == "verified"
    assert (
        verdict(
            language.replace("не ", "").replace("ら", "り").replace("nicht", "gut").replace(" pas", ""), text
        )
        != "verified"
    )


def test_decomposed_accents_are_the_same_letters() -> None:
    assert verdict("The café was closed.", "The cafe\u0301 was closed.") == "verified"


@pytest.mark.parametrize(
    "forms",
    [
        "walk walks walked walking",
        "hope hoped hoping",
        "hop hopped hopping",
        "agree agreed agrees",
        "sell sold selling",
        "die died dying",
        "use used using",
        "city cities",
        "box boxes",
    ],
)
def test_forms_of_a_word_have_one_key(forms: str) -> None:
    assert len({wording.word(form).keys for form in forms.split()}) == 1


@pytest.mark.parametrize(
    "pair", ["hope hop", "plan plane", "car care", "six seven", "IV VI", "not note", "1.5 15", "-3 3"]
)
def test_different_words_have_different_keys(pair: str) -> None:
    left, right = pair.split()
    assert wording.word(left).keys != wording.word(right).keys


@pytest.mark.parametrize("seed", [1, 2])
def test_precision_and_recall_on_planted_facts(seed: int) -> None:
    """What `longchat eval citations` prints."""
    totals = citing(60, 4000, seed, ())["totals"]
    whole = totals[-1]
    assert whole["precision"] >= 0.98
    assert whole["recall"] >= 0.95
    assert whole["placed"] >= 0.99
    altered = {row["kind"]: row["n"] for row in totals if row.get("true") is False}
    assert altered.keys() >= {"number", "name", "negation", "roles", "unit", "date", "place", "quantity"}


def test_statements_are_what_they_are_called() -> None:
    text, statements = planted(30, 20_000, random.Random(3))
    flat = " ".join(text.replace("-\n", "").split())
    for statement in statements:
        if statement.kind == "quote":
            assert statement.text.replace("well-known", "wellknown") in flat.replace(
                "well-known", "wellknown"
            )
        if not statement.true:
            assert statement.text not in flat


def test_time_is_linear_in_the_text_and_short_for_a_long_answer() -> None:
    """A text of 3.4 MB and an answer of 300 sentences; generous, for a busy machine."""
    rng = random.Random(4)
    text = prose(3_400_000, rng)
    begun = time.process_time()
    checker = Checker([Document("book.txt", text)])
    indexed = time.process_time()
    answer = " ".join([*text[1_000_000:1_020_000].split(". ")[:150], prose(10_000, rng)])
    citations = checker.check(answer)
    assert len(citations) > 100
    assert indexed - begun < 8
    assert time.process_time() - indexed < 6
