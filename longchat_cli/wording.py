"""Words as two statements are compared by: what may differ in a light paraphrase is taken away.

English case, inflection and small function words do not count; numbers, names, negations, quantities and the
prepositions that tell who did what to whom do. In other languages every word counts.
"""

from __future__ import annotations

import functools
import re
import unicodedata
from typing import NamedTuple

from longchat_cli.prose import words

_DENSE = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff"  # written without spaces
_LETTERS = rf"[^\W\d{_DENSE}]+"
_MARKS = "\u0300-\u036f"
_NUMBER = r"\d+(?:[.,]\d+)*"
_HYPHEN = r"[-\u2010\u2011\u00ad](?:[ \t]*\n[ \t]*)?"
SPLIT = re.compile(
    rf"((?<![\w)\]])[-\u2212]{_NUMBER}|{_NUMBER}"
    rf"|{_LETTERS}(?:(?:['’{_MARKS}]|{_HYPHEN}){_LETTERS})*[{_MARKS}]*"
    rf"|[{_DENSE}]|[!=<>]=|(?<=[\w ])[<>](?=[\w ])|[%$€£¥°+])"
)
"""Splits a text into alternating separators and words. A word hyphenated at a line's end is one word."""


def _set(text: str) -> frozenset[str]:
    return frozenset(words(text))


BE = _set("is are was were be been being am")
HAVE = _set("have has had having")
SOFT = _set("of in on at as")
"""May be left out or put in, but not exchanged for one another."""
FREE = _set("a an the this that these those which who whom and also indeed thus then therefore do does did")
NEGATIONS = _set(
    "not no never none nobody nothing nowhere neither nor without hardly scarcely barely seldom rarely"
)
DOUBTS = _set("if unless whether almost nearly false falsely deny doubt allegedly supposedly suppose pretend")
PREPOSITIONS = SOFT | _set("by to with for from about into onto under over behind between against like than")
SCALES = _set("hundred thousand million billion trillion dozen percent")
_MODALS = _set("can could may might must shall should will would")
_CONTRACTED_IS = _set("he she it that what who there here where how")
_SAME = {
    "upon": "on", "toward": "towards", "amongst": "among", "whilst": "while", "till": "until",
    "although": "though", "%": "percent", "men": "man", "women": "woman", "children": "child", "feet": "foot",
    "teeth": "tooth", "mice": "mouse", "geese": "goose", "wives": "wife", "knives": "knife", "wolves": "wolf",
    "halves": "half", "selves": "self", "thieves": "thief",
    "died": "die", "dying": "die", "lied": "lie", "lying": "lie", "tied": "tie", "tying": "tie",
}  # fmt: skip
_VERBS = """
arise arose arisen, awake awoke awoken, bear bore borne, beat beat beaten, become became become, begin
began begun, bend bent, bind bound, bite bit bitten, bleed bled, blow blew blown, break broke broken,
breed bred, bring brought, build built, burn burnt, buy bought, catch caught, choose chose chosen, cling
clung, come came come, creep crept, deal dealt, dig dug, draw drew drawn, dream dreamt, drink drank
drunk, drive drove driven, dwell dwelt, eat ate eaten, fall fell fallen, feed fed, feel felt, fight
fought, find found, flee fled, fling flung, fly flew flown, forbid forbade forbidden, forget forgot
forgotten, forgive forgave forgiven, freeze froze frozen, get got gotten, give gave given, go went gone,
grind ground, grow grew grown, hang hung, hear heard, hide hid hidden, hold held, keep kept, kneel
knelt, know knew known, lay laid, lead led, learn learnt, leave left, lend lent, lie lay lain, light
lit, lose lost, make made, mean meant, meet met, pay paid, ride rode ridden, ring rang rung, rise rose
risen, run ran run, say said, see saw seen, seek sought, sell sold, send sent, shake shook shaken, shine
shone, shoot shot, show showed shown, shrink shrank shrunk, sing sang sung, sink sank sunk, sit sat,
sleep slept, slide slid, speak spoke spoken, spend spent, spin spun, spring sprang sprung, stand stood,
steal stole stolen, stick stuck, sting stung, strike struck stricken, swear swore sworn, sweep swept,
swim swam swum, swing swung, take took taken, teach taught, tear tore torn, tell told, think thought,
throw threw thrown, understand understood, wake woke woken, wear wore worn, weave wove woven, weep wept,
win won, wind wound, write wrote written
"""
_IRREGULAR: dict[str, str] = {}
_PARTICIPLES = set(_set("put cut set hit let shut hurt cast shed spread"))
for _verb in _VERBS.split(","):
    _base, *_forms = _verb.split()
    _IRREGULAR |= {form: _base for form in _forms if form not in ("lay", "found", "wound", "ground")}
    _PARTICIPLES.add(_forms[-1])
_ONES = words("zero one two three four five six seven eight nine")
_TEENS = words("ten eleven twelve thirteen fourteen fifteen sixteen seventeen eighteen nineteen")
_TENS = words("twenty thirty forty fifty sixty seventy eighty ninety")
_DIGITS = {word: str(n) for n, word in enumerate(_ONES + _TEENS)}
_DIGITS |= {
    ten + ("" if one == "zero" else one): str(10 * tens + ones)
    for tens, ten in enumerate(_TENS, 2)
    for ones, one in enumerate(_ONES)
}  # "twentyone": a hyphen joins


class Word(NamedTuple):
    """One word: the `keys` that must be equal (none for a function word), and what its neighbours ask.

    `soft` is its class if it may come and go but not be exchanged; `text` the word folded, for joining.
    """

    text: str
    keys: tuple[str, ...]
    soft: str = ""
    possessive: bool = False

    @property
    def number(self) -> bool:
        return any(key[-1:].isdigit() for key in self.keys)

    @property
    def participle(self) -> bool:
        """It can make the passive with a form of `be`."""
        return self.text.endswith("ed") or self.text in _PARTICIPLES

    @property
    def verbal(self) -> bool:
        """It shows that the words around it are a clause and no mere phrase."""
        return (
            self.soft in ("be", "have") or self.participle or self.text in _MODALS or self.text in _IRREGULAR
        )


@functools.lru_cache(1 << 17)
def word(surface: str) -> Word:
    """What a word as it is written, from `SPLIT`, is compared by."""
    text = fold(surface)
    if text[-1:].isdigit():
        return Word(text, (_number(text),))
    base, _, tail = text.rpartition("'")
    if tail == "t" and base.endswith("n"):
        whole = {"ca": "can", "wo": "will", "sha": "shall", "ai": "is"}.get(base[:-1], base[:-1])
        inner = word(whole)
        return inner._replace(text=text, keys=(*inner.keys, "not"))
    if base and tail in ("s", "re", "m", "ve", "d", "ll"):
        inner = word(base)
        if tail == "ll":
            return inner._replace(text=text, keys=(*inner.keys, "will"))
        verb = {"re": "be", "m": "be", "ve": "have"}.get(tail, "")
        verb = "be" if tail == "s" and base in _CONTRACTED_IS else verb
        return inner._replace(text=text, soft=verb, possessive=tail == "s" and not verb)
    text = text.replace("'", "")
    return Word(text, ("can", "not")) if text == "cannot" else _plain(_SAME.get(text, text))


def fold(surface: str) -> str:
    """Case, accents, hyphens, underscores at the ends and kinds of apostrophe folded."""
    text = surface.casefold().replace("’", "'").strip("_") or surface
    if not text.isascii():
        text = "".join(c for c in unicodedata.normalize("NFKD", text) if not unicodedata.combining(c))
        text = text.replace("\u2212", "-")
    return text if text[-1:].isdigit() else re.sub(r"[-\u2010\u2011\u00ad\s]", "", text) or text


def _plain(text: str) -> Word:
    if text in BE:
        return Word(text, (), "be")
    if text in HAVE:
        return Word(text, (), "have")
    if text in SOFT:
        return Word(text, (), text)
    return Word(text, () if text in FREE else (key(text),))


def key(text: str) -> str:
    """The key of a folded word: digits for a number word, else the stem of its base form."""
    return _DIGITS.get(text) or stem(_IRREGULAR.get(text, text))


def _number(text: str) -> str:
    return text.replace(",", "") if re.fullmatch(r"-?\d{1,3}(,\d{3})+([.]\d+)?", text) else text


_MEASURE = re.compile("[aeiouy]+[^aeiouy]+")
_SHORT = re.compile("[^aeiouy]*[aeiouy][^aeiouwxy]")


def stem(word: str) -> str:
    """Inflection cut: plural, third person, past and progressive (steps 1 and 5a of Porter, 1980)."""
    if len(word) < 3 or not word.isascii() or not word.isalpha():
        return word
    if word.endswith("s") and not word.endswith(("ss", "us")):
        word = word[:-2] if word.endswith(("sses", "ies")) and len(word) > 4 else word[:-1]
    word = _cut_past(word)
    if word.endswith("y") and re.search("[aeiou]", word[:-1]):
        word = word[:-1] + "i"
    if word.endswith("e") and not _SHORT.fullmatch(word[:-1]) and _MEASURE.search(word[:-1]):
        word = word[:-1]
    return word


def _cut_past(word: str) -> str:
    if word.endswith("eed"):
        return word[:-1] if _MEASURE.search(word[:-3]) else word
    root = next((word[: -len(ending)] for ending in ("ed", "ing") if word.endswith(ending)), "")
    if not re.search("[aeiouy]", root) or len(root) < 2:
        return word
    if root.endswith(("at", "bl", "iz")) or _SHORT.fullmatch(root):
        return root + "e"
    if root[-1] == root[-2] and root[-1] not in "lsz":
        return root[:-1]
    return root
