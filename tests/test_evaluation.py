"""Generated tasks: what is planted can be found, is seeded, fits the length, and is scored rightly."""

import gzip
import json
import math
import random
import re

import pytest

from longchat_cli import prose
from longchat_cli.errors import BadInput, ContextOverflow, UsageError
from longchat_cli.evaluation import facts, haystack, lines, naturalqa, perplexity, score
from longchat_cli.evaluation.cases import Query, Setting
from longchat_cli.evaluation.reworded import REWORDED
from longchat_cli.evaluation.run import TASKS, Answer, Options, Subject, run

GENERATED = {
    "needle": facts.single,
    "lookalike": facts.lookalike,
    "values": facts.values,
    "uuid": facts.uuids,
    "digits": facts.digits,
    "varied": facts.varied,
    "reworded": facts.reworded,
    "lines": lines.lines,
}


def count(text: str) -> int:
    return len(re.findall(r"\w+|[^\w\s]", text))


def setting(length=1500, n=20, seed=0, **more):
    return Setting(length, n, count, random.Random(seed), **more)


@pytest.mark.parametrize("name", GENERATED)
@pytest.mark.parametrize("length", [600, 2500])
def test_cases_fit_and_hold_their_evidence_where_they_say(name, length):
    cases = list(GENERATED[name](setting(length, 20)))
    assert sum(len(case.queries) for case in cases) == 20
    for case in cases:
        assert 0.93 * length <= count(case.document) <= length
        for query in case.queries:
            assert case.document.count(query.evidence) == 1
            assert score.contains(query.evidence, query.references)
            assert abs(case.document.index(query.evidence) / len(case.document) - query.depth) < 0.25
            assert not score.contains(query.question, query.references)


@pytest.mark.parametrize("name", GENERATED)
def test_cases_are_seeded(name):
    first, again, other = (list(GENERATED[name](setting(n=3, seed=seed))) for seed in (1, 1, 2))
    assert first == again != other


def test_depths_spread_over_the_text():
    depths = [case.queries[0].depth for case in facts.single(setting(n=60))]
    assert min(depths) < 0.15 and max(depths) > 0.85 and 0.35 < sum(depths) / 60 < 0.65


def test_facts_stand_between_sentences():
    for case in facts.single(setting(n=20)):
        before, _, after = case.document.partition(case.queries[0].evidence)
        assert (not before or re.search(r"[.!?][\"'”’)]*\s+$", before)) and re.match(r" [A-Z]|$", after)


def test_lookalikes_share_their_wording_but_neither_key_nor_number():
    case = next(facts.lookalike(setting(n=10)))
    assert len({query.question for query in case.queries}) == 10
    assert len({query.references for query in case.queries}) == 10
    assert case.document.count("special magic numbers") == 10


def test_fewer_questions_than_facts_keep_the_lookalikes():
    case = next(facts.lookalike(setting(n=2)))
    assert len(case.queries) == 2 and case.document.count("special magic numbers") == 10


def test_values_of_one_key_are_all_wanted():
    (query,) = next(facts.values(setting(n=1))).queries
    assert query.every and len(set(query.references)) == 4
    assert score.grade(" and ".join(query.references), query.references, query.every) == 1
    assert score.grade(query.references[2], query.references, query.every) == 0.25


@pytest.mark.parametrize("generate,length", [(facts.uuids, 36), (facts.digits, 64)])
def test_long_answers(generate, length):
    for case in generate(setting(n=5)):
        (answer,) = case.queries[0].references
        assert len(answer) == length and answer in case.document
        assert not score.contains(answer[:-1], [answer])


@pytest.mark.parametrize("name", GENERATED)
def test_right_answers_fit(name):
    """Even with a token for each character of what is asked, and a few words before it."""
    for case in GENERATED[name](setting(n=10)):
        for query in case.queries:
            wanted = " ".join(query.references if query.every else query.references[:1])
            assert TASKS[name].answer_tokens >= len(wanted) + 16


def test_many_keyed_facts():
    case = next(facts.lookalike(setting(60_000, n=500, per_text=500)))
    assert len({query.question for query in case.queries}) == 500


def test_varied_facts_have_words_of_their_own():
    case = next(facts.varied(setting(n=20)))
    shapes = {re.sub(r"\d+", "", query.evidence) for query in case.queries}
    assert len(shapes) == 20 and len(facts.VARIED) >= 20


COMMON = prose.words(
    """
    a an the of to in on at by for from with out up off into under inside near prior before while and or not
    is was are were be did does do has have had what which who whom where whether how when many much that
    this it its his her their our my he she they them him only most no because until each every whose as same
    """
)


def stems(text: str) -> set[str]:
    words = set(re.findall(r"[a-z]+", re.sub("'s|’s", "", text.lower()))) - set(COMMON)
    return {re.sub(r"(ing|ed|es|s|er|y|e)$", "", word) for word in words}


@pytest.mark.parametrize("fact,question,answer", REWORDED, ids=lambda text: text[:20])
def test_reworded_questions_share_no_content_word_with_their_fact(fact, question, answer):
    assert not stems(fact) & stems(question), stems(fact) & stems(question)
    assert score.contains(fact, [answer]) and question.endswith("?") and fact.endswith(".")


def test_reworded_pool():
    assert len(REWORDED) >= 50
    assert len({answer for _, _, answer in REWORDED}) == len(REWORDED)


def test_a_book_is_used_without_its_licence(tmp_path):
    body = prose.prose(30_000, random.Random(5))
    book = tmp_path / "book.txt"
    book.write_bytes(
        b"\xef\xbb\xbfLicence words\n\n*** START OF THIS PROJECT GUTENBERG EBOOK X ***\n"
        + body.encode().replace(b"\n", b"\r\n")
        + b"*** END OF THIS PROJECT GUTENBERG EBOOK X ***\nMore licence words\n"
    )
    text = haystack.load_text([tmp_path])
    assert text is not None and text == body.strip() + "\n"
    case = next(facts.single(setting(1000, data=(book,))))
    assert re.sub(r"One of the special.*?\. ", "", case.document).strip() in body


def test_a_text_that_is_too_short_is_refused(tmp_path):
    (tmp_path / "b.txt").write_text("Only this. And that.")
    with pytest.raises(UsageError, match="fewer than"):
        next(facts.single(setting(1000, data=(tmp_path,))))


def test_a_length_without_room_is_refused():
    for generate in (facts.single, facts.lookalike, facts.varied):
        with pytest.raises(UsageError):
            next(generate(setting(8)))


def test_cut_keeps_to_the_length_anywhere():
    text = prose.prose(60_000, random.Random(0))
    for seed in range(20):
        part = haystack.cut(text, 1000, count, random.Random(seed))
        assert 960 <= count(part) <= 1000 and part in text


def test_prose_varies():
    text = prose.prose(20_000, random.Random(0))
    sentences = re.split(r"(?<=[.])\s+", text)
    assert len(set(sentences)) > 0.95 * len(sentences)


def test_longeval_files(tmp_path):
    rows = [f"line odd-{i}: REGISTER_CONTENT is <{i * 7}>" for i in range(40)]
    record = {
        "random_idx": ["odd-12", 12],
        "expected_number": 84,
        "num_lines": 40,
        "correct_line": rows[12] + "\n",
        "prompt": "Intro. Now the record start:\n\n"
        + "\n".join(rows)
        + "\n\nNow the record is over. Tell me.",
    }
    with gzip.open(tmp_path / "lines.jsonl.gz", "wt") as file:
        file.write(json.dumps(record) + "\n")
    size = count("\n".join(rows))
    (case,) = lines.lines(setting(size, n=5, data=(tmp_path,)))
    assert case.document == "\n".join(rows) and case.length == size
    assert case.queries[0].references == ("84",) and "odd-12" in case.queries[0].question
    with pytest.raises(UsageError, match=f"cases of {size} to {size} tokens"):
        next(lines.lines(setting(size * 2, data=(tmp_path,))))


def test_natural_questions(tmp_path):
    records = [
        {
            "question": f"who won prize {i}",
            "answers": [f"Name{i}"],
            "passage": f"Prize {i} was won by\nName{i}.",
        }
        for i in range(30)
    ] + [{"question": "no answer here", "answers": ["absent"], "passage": "Nothing."}] * 50
    (tmp_path / "nq.jsonl").write_text("\n".join(map(json.dumps, records)))
    cases = list(naturalqa.naturalqa(setting(2000, n=25, data=(tmp_path,))))
    assert [len(case.queries) for case in cases] == [20, 5]
    for case in cases:
        assert all(query.evidence in case.document for query in case.queries)
    with pytest.raises(UsageError, match="there are 30 natural questions"):
        next(naturalqa.naturalqa(setting(2000, n=31, data=(tmp_path,))))


def test_damaged_records_are_one_line(tmp_path):
    (tmp_path / "x.jsonl.gz").write_bytes(b"no gzip")
    with pytest.raises(BadInput, match="not a file of JSON lines"):
        haystack.load_records([tmp_path], "passage")


@pytest.mark.parametrize(
    ("answer", "reference", "correct"),
    [
        ("The number is 4,152,637.", "4152637", True),
        ("It's <2416>.", "2416", True),
        ("24169", "2416", False),
        ("The Röntgen.", "Rontgen", True),
        ("They call it BISCUIT!", "Biscuit", True),
        ("biscuits", "Biscuit", False),
        ("in the   old\ntown hall", "old town hall", True),
        ("", "x", False),
    ],
)
def test_containment(answer, reference, correct):
    assert score.contains(answer, [reference]) is correct


def test_wilson_interval():
    low, high = score.interval(19, 20)
    assert low == pytest.approx(0.7639, abs=1e-4) and high == pytest.approx(0.9911, abs=1e-4)
    assert score.interval(0, 0) == (0.0, 1.0)
    assert score.interval(0, 5)[0] == 0.0 and score.interval(5, 5)[1] == pytest.approx(1.0)


def oracle(document, questions):
    """Answers by looking for the sentence that shares most words with the question."""
    sentences = re.split(r"(?<=[.>])\s+", document)
    for question in questions:
        asked = set(re.findall(r"\w+", question.lower()))
        best = sorted(sentences, key=lambda s: -len(asked & set(re.findall(r"\w+", s.lower()))))
        yield Answer(best[0], tuple(best[:3]), {"seen": len(document)})


def test_run_scores_each_sample_and_totals():
    subject = Subject(count, lambda document, questions: list(oracle(document, questions)))
    seen = []
    options = Options((600, 900), n=6, seed=3)
    result = run("lookalike", subject, options, lambda done, total: seen.append((done, total)))
    assert json.loads(json.dumps(result)) == result
    assert [total["n"] for total in result["totals"]] == [6, 6] and seen[-1] == (12, 12)
    total = result["totals"][0]
    assert total["correct"] == 6 and total["found_first"] == 6 and total["low"] < 1
    sample = result["samples"][0]
    assert sample["correct"] and sample["rank"] == 1 and sample["answer"] and sample["tokens"] <= 600


def test_run_is_deterministic_and_lengths_are_independent():
    subject = Subject(count, lambda document, questions: list(oracle(document, questions)))

    def documents(lengths):
        samples = run("needle", subject, Options(lengths, n=3))["samples"]
        return [(s["evidence"], s["depth"]) for s in samples if s["length"] == 900]

    assert documents((900,)) == documents((500, 900))


def test_wrong_answers_are_wrong_and_found_passages_are_told_apart():
    subject = Subject(count, lambda document, questions: [Answer("7", ("nothing here",)) for _ in questions])
    result = run("needle", subject, Options((500,), n=4))
    assert result["totals"][0]["correct"] == 0 and result["totals"][0]["found"] == 0


def test_a_passage_without_the_answer_is_told_from_one_with_it():
    def answer(document, questions):
        return [Answer("", (document[:40], document)) for _ in questions]

    planted = "The owner of the farm by the lake is an old man. His name is Jansen."
    query = Query("Who?", ("Jansen",), planted, 0.0)
    begin, whole = planted[:48], f"Before. {planted} After."
    assert (score.rank([begin, whole], query), score.reached([begin, whole], query)) == (2, 1)
    assert (score.rank([begin], query), score.reached(["Jansen", "His name is Jansen."], query)) == (
        None,
        None,
    )
    (total,) = run("needle", Subject(count, answer), Options((500,), n=4))["totals"]
    assert total["found"] == total["reached"] == 4


def test_what_a_model_says_itself_counts_apart():
    def answer(document, questions):
        return [Answer(f"No.\n\n> {document}", (), None, "No.") for _ in questions]

    (total,) = run("reworded", Subject(count, answer), Options((900,), n=4))["totals"]
    assert (total["correct"], total["own"]) == (4, 0)
    (total,) = run("reworded", Subject(count, oracle), Options((900,), n=4))["totals"]
    assert total["own"] == total["correct"] > 0


def test_gold_is_asked_of_the_planted_text_alone():
    class Reader:
        def from_text(self, method, document, questions):
            assert method == "full" and count(document) < 40
            return [document for _ in questions]

    subject = Subject(count, lambda d, questions: [Answer("7") for _ in questions], search=Reader)
    result = run("reworded", subject, Options((900,), n=4, gold=True))
    (total,) = result["totals"]
    assert total["correct"] == 0 and total["gold"] == 4
    assert all(sample["gold_answer"] == sample["evidence"] for sample in result["samples"])


def test_a_refused_text_is_recorded_and_the_run_goes_on():
    def answer(document, questions):
        if count(document) > 700:
            raise ContextOverflow("the prompt does not fit")
        return list(oracle(document, questions))

    result = run("needle", Subject(count, answer), Options((500, 1500), n=2))
    assert [total["errors"] for total in result["totals"]] == [0, 2]
    with pytest.raises(BadInput, match="does not fit"):
        run("needle", Subject(count, answer), Options((1500,), n=2))


def test_run_refuses_nonsense():
    subject = Subject(count)
    for name, options in [("nedle", Options()), ("needle", Options(n=0)), ("needle", Options(()))]:
        with pytest.raises(UsageError):
            run(name, subject, options)
    with pytest.raises(UsageError, match="--data"):
        run("perplexity", Subject(count, encode=list, forward=lambda: None), Options())
    assert all(task.help for task in TASKS.values())


class Bigram:
    """A stateful decoder whose next-token distribution depends on the last token alone."""

    def __init__(self, table):
        self.table, self.seen = table, 0

    def __call__(self, ids):
        self.seen += len(ids)
        return self.table[list(ids)]


def test_perplexity_by_position():
    import torch

    table = torch.randn(11, 11, generator=torch.Generator().manual_seed(0))
    ids = [random.Random(0).randrange(11) for _ in range(40)]
    expected = [-table.log_softmax(-1)[a, b].item() for a, b in zip(ids, ids[1:], strict=False)]
    for chunk in (1, 7, 64):
        got = [loss for part in perplexity.losses(Bigram(table), ids, chunk) for loss in part]
        assert got == pytest.approx(expected, abs=1e-5)
    rows = perplexity.by_position(expected, 16)
    assert [(row["begin"], row["end"]) for row in rows] == [(1, 16), (17, 32), (33, 39)]
    assert rows[0]["perplexity"] == pytest.approx(math.exp(sum(expected[:16]) / 16))


def test_perplexity_task(tmp_path):
    import torch

    (tmp_path / "b.txt").write_text(prose.prose(3000, random.Random(0)))
    table = torch.zeros(256, 256)
    subject = Subject(count, encode=lambda text: list(text.encode()), forward=lambda: Bigram(table))
    result = run("perplexity", subject, Options((1000,), data=(tmp_path,)))
    total = result["totals"][0]
    assert total["perplexity"] == pytest.approx(256) and total["positions"][0]["end"] == 256
    assert len(result["samples"][0]["losses"]) == 999
