"""The token-exact prompt assembler: a chat template's control tokens around text that stays text.

The template is rendered around placeholders and split there. Its own pieces are encoded with control tokens
recognised, documents and messages without, and the ids are spliced. Nothing a document contains can become
a control token, and a prompt is the same ids up to the first character that differs between two questions.
"""

from __future__ import annotations

import datetime
import functools
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.sandbox
import jinja2.visitor

from longchat_cli.errors import BadInput
from longchat_cli.thinking import BEGIN, END, Thinking
from longchat_cli.tokens import Tokenizer

Role = Literal["system", "user", "assistant"]

BASE_TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ m.content }}\n\n"
    "{% elif m.role == 'user' %}User: {{ m.content }}\n"
    "{% else %}Assistant: {{ m.content }}\n"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}Assistant:{% endif %}"
)
"""The layout for base models, which have no template; `Assembler.stops` then ends an answer."""

_LIMIT = 1 << 20  # characters a template may write in one render
_STEPS = 1 << 16  # loop steps and macro calls it may take
_EDGE = "\u2003"  # a blank no template writes: it is gone after rendering if the template trims
_SLOT = re.compile(f"({_EDGE}?)\ue000(\\d+)\ue001({_EDGE}?)")
_UNUSABLE = "the model's chat template cannot be used"


@dataclass(frozen=True)
class Text:
    """Text of a message; `source` and `offset` (characters) say where in a document it comes from."""

    text: str
    source: str | None = None
    offset: int = 0


@dataclass(frozen=True)
class Message:
    """One turn. Parts are encoded apart, so that a document's ids do not depend on the question after it."""

    role: Role
    parts: tuple[Text, ...]

    @classmethod
    def of(cls, role: Role, *texts: str | Text) -> Message:
        """A message of strings and texts, in order: documents first, the question last."""
        return cls(role, tuple(Text(t) if isinstance(t, str) else t for t in texts))

    @property
    def text(self) -> str:
        """All parts, joined."""
        return "".join(part.text for part in self.parts)


@dataclass(frozen=True)
class Region:
    """Tokens [start, stop) of a prompt; for text, the characters [begin, end) of `source` they come from."""

    start: int
    stop: int
    kind: Literal["control", "text"]
    source: str | None = None
    begin: int = 0
    end: int = 0


@dataclass(frozen=True)
class Prompt:
    """Token ids, regions that cover them without gaps, and per token its character in its region's source."""

    ids: list[int] = field(default_factory=list)
    regions: list[Region] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.ids)

    def __add__(self, other: Prompt) -> Prompt:
        shift = len(self.ids)
        moved = [replace(r, start=r.start + shift, stop=r.stop + shift) for r in other.regions]
        return Prompt(self.ids + other.ids, self.regions + moved, self.offsets + other.offsets)

    def locate(self, start: int, stop: int) -> list[tuple[str | None, int, int]]:
        """(source, begin, end) in characters for each text region that tokens [start, stop) touch."""
        found = []
        for r in self.regions:
            first, last = max(start, r.start), min(stop, r.stop)
            if r.kind == "text" and first < last:
                end = self.offsets[last] if last < r.stop else r.end
                # Tokens inside one character (split UTF-8) start at the same one: include it.
                found.append((r.source, self.offsets[first], max(end, self.offsets[last - 1] + 1)))
        return found


class Assembler:
    """Renders messages with a tokenizer's chat template, token by token exact.

    Raises BadInput when the template cannot be used. What templates do is kept: default system prompts,
    trimming of messages, thinking cut from earlier answers, dates (the day this object was made).
    """

    folds_system: bool
    """The template drops or refuses a system message: it becomes the start of the first user turn."""
    strips_thinking: bool
    """The template cuts `<think>...</think>` from answers before the last question."""
    append_only: bool
    """`render(history)` equals `render(first) + answer ids + turn(next)`. False where the template rewrites
    earlier turns (thinking cut, the system text moved to the last turn); `turn` keeps them as they are."""
    stops: tuple[str, ...]
    """Strings at which an answer ends although no end token comes: base models without a template."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.stops = () if tokenizer.chat_template else ("\nUser:",)
        self._template = _compile(tokenizer.chat_template or BASE_TEMPLATE)
        self.folds_system = self._lacks_system()
        plain = self._next_turn(["user"])
        self._answer_lead, self._turn = plain.lead, plain.pieces
        self.strips_thinking = self._cuts_thinking()
        systems = [] if self.folds_system else [self._next_turn(["system", "user"])]
        longer = self._next_turn(["user", "assistant", "user"])
        same = all(t.appended and t.pieces == self._turn for t in (plain, longer, *systems))
        self.append_only = same and not self.strips_thinking

    def render(self, messages: Sequence[Message], *, answer: bool = True) -> Prompt:
        """The conversation from its beginning; `answer` opens the assistant's turn. Raises BadInput."""
        messages = self._prepare(messages)
        pieces = self._pieces([m.role for m in messages], answer=answer)
        return self._start(self._splice(pieces, messages, opened=False))

    def opening(self, system: Message | None = None) -> Prompt:
        """What every conversation with this system message begins with: all up to the first user's text."""
        user = Message.of("user", "x")
        messages = self._prepare([system, user] if system else [user])
        pieces = self._pieces([m.role for m in messages], answer=False)
        last = len(messages) - 1
        cut = next(i for i, p in enumerate(pieces) if isinstance(p, _Slot) and p.index == last)
        head, slot = list(pieces[:cut]), pieces[cut]
        if self.folds_system and system and isinstance(slot, _Slot):
            head.append(replace(slot, right=False))
            messages[last] = replace(messages[last], parts=messages[last].parts[:-1])
        elif head and isinstance(head[-1], str):
            head[-1] = head[-1].rstrip()  # blanks before a text are encoded with it
        return self._start(self._splice(head, messages, opened=False))

    def turn(self, message: Message) -> Prompt:
        """What goes on from a running answer: closes it, adds the user's `message`, opens the next answer."""
        return self._splice(self._turn, [message], opened=True)

    @functools.cached_property
    def thinking(self) -> Thinking | None:
        """How the model thinks before it answers; None where its template knows nothing of that."""
        begin, end = (self.tokenizer.special.get(text) for text in (BEGIN, END))
        if begin is None or end is None or END not in (self.tokenizer.chat_template or ""):
            return None
        last = self._turn[-1] if isinstance(self._turn[-1], str) else ""
        opened = last[last.rindex(BEGIN) :] if last.rstrip().endswith(BEGIN) else ""
        texts = (f"\n{END}\n\n", f"{BEGIN}\n\n{END}\n\n", opened)
        closing, skipping, opens = (tuple(self._control(text)) for text in texts)
        return Thinking(begin, end, closing, skipping, opens, self.strips_thinking)

    def _control(self, text: str) -> list[int]:
        """The ids of a piece of template."""
        writer = _Writer(self.tokenizer, inside=True)
        writer.control(text, lead="")
        return writer.prompt.ids

    def show(self, prompt: Prompt) -> str:
        """The prompt as text, its control tokens as ⟦token⟧."""
        names = {id: f"⟦{text}⟧" for text, id in self.tokenizer.special.items()}
        shown, run = [], bytearray()
        for id in prompt.ids:
            if id in names:
                shown += [run.decode("utf-8", "replace"), names[id]]
                run.clear()
            else:
                run += self.tokenizer.token_bytes(id)
        return "".join(shown) + run.decode("utf-8", "replace")

    def _prepare(self, messages: Sequence[Message]) -> list[Message]:
        """Fold the system message where the template has none; cut thinking where the template does."""
        out = list(messages)
        if self.folds_system and out and out[0].role == "system":
            system = out.pop(0)
            if not out or out[0].role != "user":
                why = "this model's template has no system role"
                raise BadInput("a system message needs a user's message after it", why)
            out[0] = Message("user", (*system.parts, Text("\n\n"), *out[0].parts))
        if self.strips_thinking:
            last = max((i for i, m in enumerate(out) if m.role == "user"), default=0)
            for i, m in enumerate(out[:last]):
                out[i] = _without_thinking(m) if m.role == "assistant" else m
        return out

    def _pieces(self, roles: Sequence[str], *, answer: bool) -> list[str | _Slot]:
        """The template's own text and, between, the slots of the messages. Raises BadInput."""
        contents = [f"{_EDGE}\ue000{i}\ue001{_EDGE}" for i in range(len(roles))]
        pieces = _split(self._write(list(zip(roles, contents, strict=True)), answer))
        for index, role in enumerate(roles):
            if not any(isinstance(p, _Slot) and p.index == index for p in pieces):
                raise BadInput(_UNUSABLE, f"it drops a message of the {role}")
        return pieces

    def _write(self, messages: list[tuple[str, str]], answer: bool) -> str:
        """Run the template. Raises BadInput with the template's own complaint."""
        values: dict[str, Any] = dict.fromkeys(("bos_token", "eos_token", "pad_token", "unk_token"), "")
        values |= self.tokenizer.named | {"tools": None, "documents": None}
        values["messages"] = [{"role": role, "content": content} for role, content in messages]
        values["add_generation_prompt"] = answer
        return _render(self._template, values)

    def _lacks_system(self) -> bool:
        try:
            self._pieces(["system", "user"], answer=True)
        except BadInput:
            return True
        return False

    def _cuts_thinking(self) -> bool:
        answer = "<think>\ue000\ue001</think>\n\nanswer"
        try:
            text = self._write([("user", "a"), ("assistant", answer), ("user", "b")], answer=True)
        except BadInput:
            return False
        return "\ue000\ue001" not in text

    def _next_turn(self, roles: list[str]) -> _Turn:
        """How the conversation `roles` goes on, from its next answer to the one after. Raises BadInput."""
        before = self._pieces(roles, answer=True)
        answered, asked = len(roles), len(roles) + 1
        try:
            pieces = self._pieces([*roles, "assistant", "user"], answer=True)
        except BadInput as error:
            raise BadInput(_UNUSABLE, f"it has no second turn: {error.why}") from error
        at = next(i for i, p in enumerate(pieces) if isinstance(p, _Slot) and p.index == answered)
        opened, written = before[-1], pieces[at - 1]
        if not isinstance(opened, str) or not isinstance(written, str):
            raise BadInput(_UNUSABLE, "it does not mark the answer")
        lead = written.removeprefix(opened)
        appended = pieces[: at - 1] == before[:-1] and written.startswith(opened) and not lead.strip()
        rest = [replace(p, index=p.index - asked) if isinstance(p, _Slot) else p for p in pieces[at + 1 :]]
        return _Turn(rest, lead if appended else "", appended)

    def _start(self, prompt: Prompt) -> Prompt:
        """One BOS: added where the model wants it and the template does not write it, never twice."""
        bos = self.tokenizer.bos_id
        if bos is None:
            return prompt
        head = Prompt([bos], [Region(0, 1, "control")], [-1])
        if prompt.ids[:2] == [bos, bos]:
            return _drop_first(prompt)
        return head + prompt if self.tokenizer.add_bos and prompt.ids[:1] != [bos] else prompt

    def _splice(self, pieces: Sequence[str | _Slot], messages: Sequence[Message], *, opened: bool) -> Prompt:
        writer = _Writer(self.tokenizer, inside=opened)
        for piece, after in zip(pieces, [*pieces[1:], None], strict=True):
            if isinstance(piece, str):
                role = messages[after.index].role if isinstance(after, _Slot) else None
                writer.control(piece, lead=self._lead(piece, role))
            else:
                message = messages[piece.index]
                for part in _trimmed(message.parts, piece):
                    writer.text(part)
        writer.finish()
        return writer.prompt

    def _lead(self, piece: str, role: str | None) -> str:
        """The blanks at the end of a template piece that are encoded with the text after them.

        Vocabularies write a word with the blank before it. An answer's opening is already in the cache when
        the answer is generated: only blanks that the opening lacks belong to the answer.
        """
        if role is None:
            return ""
        if role == "assistant":
            return self._answer_lead if piece.endswith(self._answer_lead) else ""
        return piece[len(piece.rstrip()) :]


@dataclass(frozen=True)
class _Slot:
    """Where message `index` goes, and on which sides the template trims it."""

    index: int
    left: bool
    right: bool


@dataclass(frozen=True)
class _Turn:
    """The pieces after an answer, the blanks before the answer, and whether all before stayed the same."""

    pieces: list[str | _Slot]
    lead: str
    appended: bool


class _Writer:
    """Collects ids and regions. `inside`: ordinary text came before, so no leading space is due."""

    def __init__(self, tokenizer: Tokenizer, inside: bool) -> None:
        self.prompt = Prompt()
        self._tokenizer = tokenizer
        self._prefix = not inside
        self._lead = ""

    def control(self, piece: str, lead: str) -> None:
        for part in self._tokenizer.split_control(self._lead + piece.removesuffix(lead)):
            if isinstance(part, int):
                self._add([part], "control")
                self._prefix = self._tokenizer.prefix_after_control
            else:
                self._add(self._tokenizer.encode(part, prefix=self._prefix), "control")
                self._prefix = False
        self._lead = lead

    def text(self, part: Text) -> None:
        if not part.text:
            return
        lead, self._lead = self._lead, ""
        ids, starts = self._tokenizer.encode_with_offsets(lead + part.text, prefix=self._prefix)
        self._prefix = False
        ends = [*starts[1:], len(lead) + len(part.text)] if starts else []
        blank = next((i for i, end in enumerate(ends) if end > len(lead)), len(ids))
        self._add(ids[:blank], "control")
        offsets = [max(start - len(lead), 0) + part.offset for start in starts[blank:]]
        self._add(ids[blank:], "text", part, offsets)

    def finish(self) -> None:
        self.control("", "")

    def _add(
        self,
        ids: list[int],
        kind: Literal["control", "text"],
        part: Text | None = None,
        offsets: Sequence[int] = (),
    ) -> None:
        if not ids:
            return
        p = self.prompt
        start, stop = len(p.ids), len(p.ids) + len(ids)
        p.ids.extend(ids)
        p.offsets.extend(offsets or [-1] * len(ids))
        if part:
            p.regions.append(
                Region(start, stop, kind, part.source, part.offset, part.offset + len(part.text))
            )
        elif p.regions and p.regions[-1].kind == kind:
            p.regions[-1] = replace(p.regions[-1], stop=stop)
        else:
            p.regions.append(Region(start, stop, kind))


def _drop_first(prompt: Prompt) -> Prompt:
    moved = [replace(r, start=max(r.start - 1, 0), stop=r.stop - 1) for r in prompt.regions]
    return Prompt(prompt.ids[1:], [r for r in moved if r.stop > r.start], prompt.offsets[1:])


def _split(text: str) -> list[str | _Slot]:
    pieces: list[str | _Slot] = []
    position = 0
    for match in _SLOT.finditer(text):
        if match.start() > position:
            pieces.append(text[position : match.start()])
        pieces.append(_Slot(int(match[2]), left=not match[1], right=not match[3]))
        position = match.end()
    return [*pieces, text[position:]] if position < len(text) else pieces


def _trimmed(parts: Sequence[Text], slot: _Slot) -> list[Text]:
    """The parts as the template would leave them: blanks cut at the ends it trims."""
    out = list(parts)
    while slot.left and out:
        text = out[0].text.lstrip()
        out[0] = replace(out[0], text=text, offset=out[0].offset + len(out[0].text) - len(text))
        if text:
            break
        out.pop(0)
    while slot.right and out:
        out[-1] = replace(out[-1], text=out[-1].text.rstrip())
        if out[-1].text:
            break
        out.pop()
    return out


def _without_thinking(message: Message) -> Message:
    text = message.text
    if END not in text:
        return message
    return Message.of(message.role, text.rsplit(END, 1)[1].lstrip("\n"))


class _Environment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """A sandbox for templates of unknown origin: loops, output and repetition are bounded."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        numbers = isinstance(left, int | float) and isinstance(right, int | float)
        if operator == "+" and not numbers and len(left) + len(right) > _LIMIT:
            raise jinja2.TemplateError("it writes without end")
        if operator in ("*", "**") and not numbers:
            raise jinja2.TemplateError(f"'{operator}' of text is not allowed")
        if operator == "**" and max(abs(left), abs(right)) > 64:
            raise jinja2.TemplateError("the power is too large")
        if operator == "%" and isinstance(left, str) and len(re.findall(r"\d{4,}|\*", left)):
            raise jinja2.TemplateError("the field is too wide")
        return super().call_binop(context, operator, left, right)

    def _parse(self, source: str, name: str | None, filename: str | None) -> jinja2.nodes.Template:
        """Every loop body and macro starts with a step of the budget, so that no template runs for ever."""
        tree: jinja2.nodes.Template = _Sums().visit(super()._parse(source, name, filename))
        for node in tree.find_all((jinja2.nodes.For, jinja2.nodes.Macro)):
            step = jinja2.nodes.Call(jinja2.nodes.Name("_step", "load"), [], [], None, None)
            node.body.insert(0, jinja2.nodes.ExprStmt(step))  # type: ignore[attr-defined]
        return tree


class _Sums(jinja2.visitor.NodeTransformer):
    """`a ~ b` becomes the sum of strings, whose length the environment bounds."""

    def visit_Concat(self, node: jinja2.nodes.Concat) -> jinja2.nodes.Expr:  # noqa: N802
        strings: list[jinja2.nodes.Expr]
        strings = [jinja2.nodes.Filter(self.visit(n), "string", [], [], None, None) for n in node.nodes]
        return functools.reduce(jinja2.nodes.Add, strings)


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks the answer for training; here it is its body."""

    tags = {"generation"}

    def parse(self, parser: Any) -> Any:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _compile(source: str) -> jinja2.Template:
    """Raises BadInput when the template is not valid Jinja."""
    extensions: list[Any] = ["jinja2.ext.loopcontrols", _Generation]
    environment = _Environment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    environment.filters["tojson"] = _tojson
    today = datetime.datetime.now()
    environment.globals |= {"raise_exception": _raise, "strftime_now": today.strftime}
    try:
        return environment.from_string(source)
    except (jinja2.TemplateError, RecursionError, ValueError) as error:
        raise BadInput(_UNUSABLE, f"it is not valid: {error}") from error


def _render(template: jinja2.Template, values: dict[str, Any]) -> str:
    """The template's output. Raises BadInput when it fails or exceeds its budget."""
    budget = iter(range(_STEPS))

    def step() -> None:
        if next(budget, None) is None:
            raise jinja2.TemplateError("it loops without end")

    try:
        return "".join(_bounded(template.generate(values | {"_step": step})))
    except Exception as error:  # a template can raise anything that Python can
        why = str(error) or type(error).__name__
        raise BadInput(_UNUSABLE, why) from error


def _bounded(pieces: Iterator[str]) -> Iterator[str]:
    size = 0
    for piece in pieces:
        size += len(piece)
        if size > _LIMIT:
            raise jinja2.TemplateError("it writes without end")
        yield piece


def _tojson(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
