"""Decoder layers through the native library: a few rows in low-bit products, many in bfloat16 ones.

The same steps as `lean.Products`, which is the reference. Many rows go through tile instructions, on weights
made bfloat16 as they pass, where the CPU has them; else torch multiplies dense ones. For products of a few
rows activations become int8, with a scale for each 32. One int8 number loses twice as much as bfloat16 does,
so each is kept in two: that costs a tenth of the products' time, most of which goes into reading the weights.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from longchat_cli import __version__, kernels
from longchat_cli.attention import method_class
from longchat_cli.attention.layer import Cache
from longchat_cli.config import cache_dir
from longchat_cli.errors import BadInput, StorageError
from longchat_cli.kernels import Rotation, native
from longchat_cli.models import lean, step, tiles
from longchat_cli.models.fetch import Say, to_stderr
from longchat_cli.models.files import read_json, write_json
from longchat_cli.models.pace import Pace

DIFFERS = 0.1
"""Most that logits may differ from torch's, relative to their spread; rounding alone sets them 0.02 apart."""
LIKELY = 64
"""So many of the likeliest tokens are compared, by either path: of the others the library knows less."""
TRIAL = (24, 8)
"""Tokens that the check reads at once, and those that it decodes one by one."""
TILES = "tiles.safetensors"
HEAD, REST = "head.0", "rest"
"""In it, the last product's weights, and what their upper bits leave."""
NORMS = ("attention_norm", "q_norm", "k_norm", "after_attention", "mlp_norm", "after_mlp")
_GATES = {"silu": 0, "gelu_pytorch_tanh": 1}


def serve(decoder: lean.LeanDecoder, path: Path, fingerprint: str, say: Say = to_stderr) -> bool:
    """Give `decoder`, loaded from the ready form `path`, the library's products where they serve it.

    They are compared with torch's once for each model, CPU and version of longchat; the verdict is kept.
    """
    reason = _refusal(decoder)
    if reason is None:
        file = path / TILES
        products = NativeProducts(decoder, Tiles(file) if file.exists() else None)
        difference = _difference(decoder, products, fingerprint)
        if difference <= DIFFERS:
            decoder.products = products
            bits = "low-bit tiles" if products.tiles else "bfloat16 weights"
            prompts = "native library (amx)" if products.tiled_rows else "torch on bfloat16 weights"
            decoder.notes = f"decoding: native library ({native.isa()}) on {bits}", f"prompts: {prompts}"
            return True
        reason = f"its results differ from torch's by {difference:.2f}"
        say(f"the native library is not used: {reason}; torch decodes, more slowly")
    decoder.notes = (f"decoding: torch, not the native library: {reason}",)
    return False


def _refusal(decoder: lean.LeanDecoder) -> str | None:
    """Why the library cannot serve; None when it can."""
    if decoder.device.type != "cpu":
        return "the model is not on the CPU"
    if decoder.dtype != torch.bfloat16:
        return f"dtype {decoder.dtype}"
    if kernels.forced() not in (None, "native"):
        return f"--kernel {kernels.forced()}"
    if decoder.dim % 16 or decoder.dim > native.WIDEST:
        return f"heads of width {decoder.dim}"
    if any(block.gate_up.bias is not None or block.down.bias is not None for block in decoder.blocks):
        return "biases in the MLP"
    return native.missing()


def _difference(decoder: lean.LeanDecoder, products: NativeProducts, fingerprint: str) -> float:
    """How far the library's logits are from torch's; remembered."""
    parts = (fingerprint, __version__, torch.__version__, native.isa(), native.stamp(), TRIAL)
    key = hashlib.sha256(json.dumps(parts).encode()).hexdigest()
    file = cache_dir() / "native" / f"{key}.json"
    known = read_json(file)
    if isinstance(known, dict) and isinstance(known.get("difference"), float):
        return known["difference"]
    difference = _compare(decoder, products)
    try:
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_json(file, {"difference": difference})
    except (OSError, StorageError):
        pass  # it costs the next start another comparison
    return difference


def _compare(decoder: lean.LeanDecoder, products: NativeProducts) -> float:
    """The most that the two paths' logits are apart at a step of a trial, as a share of their spread."""
    before, asked, served = decoder.products, kernels.forced(), kernels.served.copy()
    try:
        ids = _own_text(decoder, products)
        found = _trial(decoder, products, ids)
        kernels.force("sdpa")
        expected = _trial(decoder, before, ids)
    finally:
        decoder.products = before
        kernels.force(asked)
        kernels.served.clear()  # --verbose counts what answers took
        kernels.served.update(served)
    likely = torch.cat([x.topk(min(LIKELY, x.shape[-1])).indices for x in (found, expected)], dim=-1)
    apart = (found - expected).gather(-1, likely).square().mean(-1).sqrt()
    return float((apart / expected.std(-1)).nan_to_num(torch.inf).max())


def _own_text(decoder: lean.LeanDecoder, products: NativeProducts) -> Tensor:
    """Tokens that follow one another by the model, int64 [sum(TRIAL)].

    Over random ones rounding is amplified: it alone sets Gemma 3's logits up to 0.6 of their spread apart.
    """
    decoder.products = products
    cache = decoder.new_cache(method_class("full").build({}))
    cache.decoding = True
    generator = torch.Generator().manual_seed(0)
    ids = [int(decoder.config.get("bos_token_id") or 0)]
    while len(ids) < sum(TRIAL):
        logits = decoder.forward(torch.tensor(ids[-1:]), cache)[-1]
        likely = logits.nan_to_num().softmax(-1)
        ids.append(int(torch.multinomial(likely, 1, generator=generator)))
    return torch.tensor(ids)


def _trial(decoder: lean.LeanDecoder, products: lean.Products, ids: Tensor) -> Tensor:
    decoder.products = products
    cache = decoder.new_cache(method_class("full").build({}))
    logits = [decoder.forward(ids[: TRIAL[0]], cache)[-1]]
    cache.decoding = True
    for index in range(TRIAL[0], len(ids)):
        logits.append(decoder.forward(ids[index : index + 1], cache)[-1])
    return torch.stack(logits)


class Tiles:
    """The tiles of a ready form, memory-mapped. Raises BadInput when the file is not what it says.

    The library reads as far as a form says: one that does not fit its bytes or its model must not reach it.
    """

    def __init__(self, file: Path) -> None:
        self.file = file
        try:
            with safe_open(file, framework="pt") as handle:
                self.tensors = {name: _copied(handle.get_tensor(name)) for name in handle.keys()}  # noqa: SIM118
                stored = (handle.metadata() or {}).items()
                self.forms = {name: tiles.Form(**json.loads(form)) for name, form in stored}
            shapes = {name: form.shape for name, form in self.forms.items()}
            if REST in self.tensors:
                shapes[REST] = self.forms[HEAD].rest
            fit = all(tensor.shape == shapes[name] for name, tensor in self.tensors.items())
        except (SafetensorError, OSError, TypeError, ValueError, KeyError) as error:
            raise self._damaged(str(error)) from error
        if not fit or any(tensor.dtype != torch.uint8 for tensor in self.tensors.values()):
            raise self._damaged("its tiles do not have the size that it says")

    def _damaged(self, why: str) -> BadInput:
        return BadInput(f"{self.file} is damaged", why, "remove it and pull the model again")

    def parts(self, product: str, weights: Sequence[Tensor]) -> list[native.Linear]:
        """The library's structures for `weights` below one another; empty where there are none."""
        names = [f"{product}.{index}" for index in range(3) if f"{product}.{index}" in self.tensors]
        forms = [self.forms[name] for name in names]
        if not forms:
            return []
        rows, cols = sum(len(weight) for weight in weights), weights[0].shape[1]
        if sum(form.rows for form in forms) != rows or any(form.cols != cols for form in forms):
            raise self._damaged(f"{product} has other tiles than weights")
        return [
            native.Linear(
                self.tensors[name].data_ptr(),
                form.rows,
                form.cols,
                form.bits,
                form.group,
                form.offset,
            )
            for name, form in zip(names, forms, strict=True)
        ]

    def rest(self) -> int | None:
        """The address of what the last product's upper bits leave, where they are apart."""
        return self.tensors[REST].data_ptr() if REST in self.tensors else None


def _copied(stored: Tensor) -> Tensor:
    """Read into memory: pages of a file are small ones."""
    return native.empty(stored, *stored.shape).copy_(stored)


class NativeProducts(lean.Products):
    """`lean.Products` by the library; without tile instructions the products of many rows stay torch's."""

    def __init__(self, decoder: Any, tiled: Tiles | None) -> None:
        super().__init__(decoder)
        self.tiles = tiled  # the structures below point into it
        d = decoder
        gate, threads = _GATES[d.activation], torch.get_num_threads()
        self.model = native.Model(d.heads, d.kv_heads, d.dim, d.width, d.hidden, gate, threads, d.eps)
        self.kept: list[Tensor] = []  # what only the structures point to
        blocks = [self._block(index, block) for index, block in enumerate(d.blocks)]
        self.blocks = (native.Block * d.layers)(*blocks)
        self.table = step.Table(d.layers, d.dim)
        self.pace = Pace()
        self.spent: ctypes.Array[ctypes.c_int64] | None = None  # nanoseconds of native.PHASES, if asked for
        self.head = native.Head(self._parts("head", [d.head])[0], self.tiles.rest() if self.tiles else None)
        # Gate and up lie in one run of tiles, which must not share one.
        self.tiled_rows = native.has_tiles() and d.hidden % native.TILE == 0

    def _block(self, index: int, block: lean.Block) -> native.Block:
        made = native.Block()
        for name in NORMS:
            factors = getattr(block, name)
            if factors is not None:
                setattr(made, name, factors.data_ptr())
        for name, bias in (("qkv_bias", block.qkv.bias), ("o_bias", block.o.bias)):
            if bias is not None:
                self.kept.append(bias.float().contiguous())
                setattr(made, name, self.kept[-1].data_ptr())
        for name in ("qkv", "o", "gate_up", "down"):
            parts = self._parts(f"layers.{index}.{name}", getattr(block, name).weights)
            for place, part in enumerate(parts):
                getattr(made, name)[place] = part
        return made

    def _parts(self, product: str, weights: Sequence[Tensor]) -> list[native.Linear]:
        tiled = self.tiles.parts(product, weights) if self.tiles else []
        return tiled or [native.Linear(x.data_ptr(), *x.shape, 16, 32, 0) for x in weights]

    def enter(self, index: int, x: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor, Tensor]:
        d, rows = self.decoder, x.shape[0]
        heads = x.new_empty(d.heads + 2 * d.kv_heads, rows, d.dim, dtype=torch.bfloat16)
        q, k = heads[: d.heads], heads[d.heads : d.heads + d.kv_heads]
        v = heads[d.heads + d.kv_heads :]
        to = (*_angles(rotation), q.data_ptr(), k.data_ptr(), v.data_ptr())
        block = ctypes.byref(self.blocks[index])
        library, model = native.loaded(), self._model()
        if rows <= native.ROWS:
            library.longchat_enter(model, block, _at(x), rows, *to)
        elif self.tiled_rows:
            library.longchat_enter_many(model, block, _at(x), rows, *to)
        else:
            normed = self._normed(x, d.blocks[index].attention_norm)
            parts = [normed @ weight.t() for weight in d.blocks[index].qkv.weights]
            pointers = (ctypes.c_void_p * 3)(*(part.data_ptr() for part in parts))
            strides = (ctypes.c_int64 * 3)(*(part.stride(0) for part in parts))
            library.longchat_rotate(model, block, pointers, strides, rows, *to)
        return q, k, v

    def leave(self, index: int, x: Tensor, out: Tensor) -> Tensor:
        d, rows = self.decoder, x.shape[0]
        library, model = native.loaded(), self._model()
        if rows <= native.ROWS or self.tiled_rows:
            if out.stride(-1) != 1:
                out = out.contiguous()
            made = ctypes.byref(self.blocks[index])
            leave = library.longchat_leave if rows <= native.ROWS else library.longchat_leave_many
            leave(model, made, _at(x), rows, _at(out), *out.stride()[:2])
            return x
        block = d.blocks[index]
        add = block.o(out.transpose(0, 1).reshape(rows, -1))
        normed = self._normed(x, block.mlp_norm, add, block.after_attention)
        gate, up = (normed @ weight.t() for weight in block.gate_up.weights)
        hidden = torch.empty_like(gate)
        library.longchat_gated(model, _at(gate), _at(up), gate.stride(0), rows, _at(hidden))
        self._add_norm(x, block.down(hidden), block.after_mlp, None, None)
        return x

    def step(self, ids: Tensor, cache: Cache, logits: int) -> Tensor | None:
        new = step.serves(cache, len(ids))
        if new is None:
            return None
        d = self.decoder
        x, rotations = d.begin(ids, cache)
        self.table.fill(cache.layers, new, [rotations[kind] for kind in d.kinds])
        q = x.new_empty(d.layers, d.heads, new.rows, d.dim, dtype=torch.bfloat16)
        found = x.new_empty(new.rows, self.head.upper.rows)
        asked = native.Step(
            ctypes.addressof(self.model),
            ctypes.addressof(self.blocks),
            ctypes.addressof(self.table.layers),
            _at(d.norm),
            ctypes.addressof(self.head),
            _at(x),
            _at(q),
            _at(found),
            self.spent and ctypes.addressof(self.spent),
            d.layers,
            new.rows,
            d.scale,
        )
        with self.pace.step(torch.get_num_threads()) as self.model.threads:
            native.loaded().longchat_step(ctypes.byref(asked))
        kernels.served["native"] += d.layers
        self.table.settle(cache.layers, new, q, d.scale)
        cache.position = new.end
        return found[-logits:]

    def logits(self, x: Tensor) -> Tensor:
        if len(x) > native.ROWS:
            return super().logits(x)
        x, d = x.contiguous(), self.decoder
        found = x.new_empty(len(x), self.head.upper.rows)
        native.loaded().longchat_logits(
            ctypes.byref(self.head), _at(d.norm), d.eps, _at(x), _at(found), len(x), torch.get_num_threads()
        )
        return found

    def _model(self) -> Any:
        self.model.threads = torch.get_num_threads()
        return ctypes.byref(self.model)

    def _normed(
        self, x: Tensor, weight: Tensor, add: Tensor | None = None, after: Tensor | None = None
    ) -> Tensor:
        """norm(x) in bfloat16, after `add` (normed by `after` if given) has joined x in place."""
        normed = torch.empty_like(x, dtype=torch.bfloat16)
        self._add_norm(x, add, after, weight, normed)
        return normed

    def _add_norm(self, x: Tensor, *rest: Tensor | None) -> None:
        """The library's: add, after, weight, out."""
        addresses = [None if tensor is None else _at(tensor) for tensor in rest]
        native.loaded().longchat_add_norm(
            _at(x), *addresses, *x.shape, self.decoder.eps, torch.get_num_threads()
        )


def _at(tensor: Tensor) -> int:
    return tensor.data_ptr()


def _angles(rotation: Rotation) -> tuple[Any, Any, int]:
    return _at(rotation.cos), _at(rotation.sin), rotation.cos.shape[-1]
