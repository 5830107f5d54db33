"""Write a `Spec` as plain PyTorch, as an author might have: the text that a failing seed shows."""

from .spec import Spec
from .writes import MOVEMENTS, Place

# layout -> (axes, from [B, T, H, D] to it, back, axis of the slots)
LAYOUTS = {
    "BSHD": ("BSHD", "{}", "{}", 1),
    "BHSD": ("BHSD", "{}.transpose(1, 2)", "{}.transpose(1, 2)", 2),
    "SBHD": ("SBHD", "{}.transpose(0, 1)", "{}.transpose(0, 1)", 0),
    "BHDS": ("BHDS", "{}.permute(0, 2, 3, 1)", "{}.permute(0, 3, 1, 2)", 3),
    "HBSD": ("HBSD", "{}.permute(2, 0, 1, 3)", "{}.permute(1, 2, 0, 3)", 2),
    "BSE": ("BSE", "{}.flatten(2)", "{}.unflatten(2, (H, D))", 1),
    "SHD": ("SHD", "{}[0]", "{}.unsqueeze(0)", 0),
    "HSD": ("HSD", "{}[0].transpose(0, 1)", "{}.transpose(0, 1).unsqueeze(0)", 1),
    "BFTHD": ("BFTHD", "{}.unsqueeze(1)", "{}.flatten(1, 2)", 1),
}

ROPES = {
    "half": """
    a, b = t.chunk(2, -1)
    return torch.cat([a * ang.cos() - b * ang.sin(), b * ang.cos() + a * ang.sin()], -1)""",
    "roll": """
    h = t.shape[-1] // 2
    turned = torch.cat([-t[..., h:], t[..., :h]], -1)
    cos, sin = (torch.cat([f(ang)] * 2, -1) for f in (torch.cos, torch.sin))
    return t * cos + turned * sin""",
    "interleaved": """
    a, b = t[..., 0::2], t[..., 1::2]
    cos, sin = ang.cos(), ang.sin()
    return torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2)""",
    "complex": """
    z = torch.view_as_complex(t.unflatten(-1, (t.shape[-1] // 2, 2)).contiguous())
    return torch.view_as_real(z * torch.polar(torch.ones_like(ang), ang)).flatten(-2)""",
    "partial": """
    h = t.shape[-1] // 4
    a, b, rest = t[..., :h], t[..., h : 2 * h], t[..., 2 * h :]
    cos, sin = ang[..., :h].cos(), ang[..., :h].sin()
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], -1)""",
    "addcmul": """
    a, b = t.chunk(2, -1)
    return torch.cat([torch.addcmul(a * ang.cos(), b, -ang.sin()),
                      torch.addcmul(b * ang.cos(), a, ang.sin())], -1)""",
    "decay": """
    a, b = t.chunk(2, -1)
    cos, sin = ang.cos() * torch.exp(-0.01 * ang), ang.sin() * torch.exp(-0.01 * ang)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)""",
}
ROPES["axes"] = ROPES["split_sink"] = ROPES["half"]


class Writer:
    """Builds the text of one model."""

    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        s = spec
        self.n = "n" if s.write in (("shift", "cat"), ("shift", "clone")) else str(s.new)
        grows = {"cat": 0, "cat_all": s.new}.get(s.stage, 0)
        self.held = s.slots + grows  # slots of what is read, before the read cuts
        self.read, self.count = self._read()

    # -- pieces --------------------------------------------------------------------------------

    def layout(self, which: str) -> str:
        return self.spec.layout_v or self.spec.layout if which == "v" else self.spec.layout

    def to_cache(self, which: str, t: str) -> str:
        return LAYOUTS[self.layout(which)][1].format(t)

    def to_work(self, which: str, t: str) -> str:
        """From the cache's layout to that of the work on it."""
        back = LAYOUTS[self.layout(which)][2].format(t).replace("H, D", f"{self.spec.heads}, -1")
        if self.spec.dtype != "float64":
            back = f"{back}.double()"
        return back if self.spec.work == "BSHD" else f"{back}.transpose(1, 2)"

    def _read(self) -> tuple[str, int]:
        """Index of the slot axis (or a whole expression with {t} and {ax}) and slots read."""
        s, total = self.spec, self.held
        sink = s.sink * s.new
        r = 2 * s.new
        options = {
            "all": ("{t}", total),
            "last": (f"{{t}}.narrow({{ax}}, {total - r}, {r})", r),
            "first": (f"{{t}}.narrow({{ax}}, 0, {r})", r),
            "sink_last": (
                f"torch.cat([{{t}}.narrow({{ax}}, 0, {max(1, sink)}), "
                f"{{t}}.narrow({{ax}}, {total - r}, {r})], {{ax}})",
                max(1, sink) + r,
            ),
            "evens": (
                f"{{t}}.unflatten({{ax}}, ({total // 2}, 2)).select({{ax}} + 1, 1)",
                total // 2,
            )
            if total % 2 == 0
            else ("{t}", total),
            "flip": ("{t}.flip({ax})", total),
            "pick": (
                f"{{t}}.index_select({{ax}}, torch.tensor({list(range(0, total, 2))}))",
                len(range(0, total, 2)),
            ),
            "twice": ("torch.cat([{t}, {t}.narrow({ax}, 0, 1)], {ax})", total + 1),
            "moving": (f"{{t}}.narrow({{ax}}, step % {total - r + 1}, {r})", r),
            "unroll": (
                f"{{t}}.index_select({{ax}}, (torch.arange({total}) + step * {s.new}) % {total})",
                total,
            ),
        }
        return options[s.read]

    def cut(self, t: str, ax: int) -> str:
        return self.read.format(t=t, ax=ax)

    def write(self, which: str, movement: str, how: str, c: str, new: str) -> list[str]:
        s = self.spec
        axis = LAYOUTS[self.layout(which)][3]
        if self.layout(which) == "BFTHD":
            place = Place(c, new, axis, "1", 1, s.frames + s.sink, s.sink)
        else:
            n = self.n if movement in ("shift", "overwrite") else str(s.new)
            place = Place(c, new, axis, n, s.new, s.slots, s.sink * s.new)
        return MOVEMENTS[movement](place, how)

    def table(self, rows: str) -> str:
        """[R] or [R, D] along the slot axis of the work layout, with room for the heads."""
        return f"{rows}[:, None]" if self.spec.work == "BSHD" else rows

    # -- positions -----------------------------------------------------------------------------

    def positions(self) -> list[str]:
        s, r = self.spec, self.count
        n, sink = s.new, min(s.sink * s.new, self.count - 1)
        off = s.offset.format(n=n)
        if s.extra_int:
            off = f"{off} + base"
        slots = {
            "slot": f"torch.arange({r})",
            "age": f"(torch.arange({r}) - step * {n}) % {r}",
            "scaled": f"(torch.arange({r}) * 2) // 3",
            "reversed": f"torch.arange({r - 1}, -1, -1)",
            "table": f"self.order[:{r}]",
        }[s.position]
        lines = [f"pos = {slots} + ({off})"]
        if sink and s.sink_offset != "same":
            own = s.sink_offset.format(n=n)
            lines.append(f"pos = torch.cat([torch.arange({sink}) + ({own}), pos[{sink}:]])")
        if s.rope == "axes":
            lines += [
                "f = self.freq.shape[0] // 2",
                f"frame, token = (pos // {n}).double(), (pos % {n}).double()",
                "ang = torch.cat([frame[:, None] * self.freq[:f], token[:, None] * self.freq[f:]], -1)",
            ]
        else:
            lines.append("ang = pos.double()[:, None] * self.freq")
        return [*lines, "return ang"]

    # -- slot-local work -----------------------------------------------------------------------

    def ops(self, t: str, ops: tuple[str, ...], ang: str = "ang") -> list[str]:
        out = []
        for op in ops:
            out += self.op(t, op, ang)
        return out

    def op(self, t: str, op: str, ang: str) -> list[str]:
        s, r = self.spec, self.count
        ax = 1 if s.work == "BSHD" else 2
        heads = "self.head[:, None]" if s.work == "BSHD" else "self.head[:, None, None]"

        def along(rows: str) -> str:
            return f"({rows})[:, None, None]" if s.work == "BSHD" else f"({rows})[:, None]"

        if op == "rope" and s.rope == "split_sink":
            cut = max(1, min(s.sink * s.new, r - 1))
            turn = self.table("{}")
            return [
                f"{t} = torch.cat([rope({t}.narrow({ax}, 0, {cut}), {turn.format(f'{ang}[:{cut}]')}), "
                f"rope({t}.narrow({ax}, {cut}, {r - cut}), {turn.format(f'{ang}[{cut}:]')})], {ax})"
            ]
        literal = [round(0.6 + 0.1 * ((3 * i) % 7), 1) for i in range(s.dim)]
        code = {
            "rope": f"rope({t}, {self.table(ang)})",
            "rms": f"{t} * torch.rsqrt({t}.pow(2).mean(-1, keepdim=True) + 1e-6) * self.gain",
            "ln": f"F.layer_norm({t}, ({s.dim},), self.gain)",
            "normalize": f"F.normalize({t}, dim=-1)",
            "head": f"{t} * {heads}",
            "slot_mul": f"{t} * {along(f'self.slot[:{r}]')}",
            "slot_add": f"{t} + {along(f'self.slot[:{r}]')}",
            "age": f"{t} * {along(f'0.97 ** torch.arange({r - 1}, -1, -1).double()')}",
            "step_int": f"{t} * (1 + step % 3)",
            "step_float": f"{t} * (1.0 + 0.002 * step)",  # a modulus here breaks torch 2.13 itself
            "f32": f"{t}.float().double()",
            "bf16": f"{t}.to(torch.bfloat16).to(torch.float64)",
            "quant": f"({t} * 16).round().clamp(-127, 127) / 16",
            "tanh": f"torch.tanh({t})",
            "gate": f"{t} * torch.sigmoid({t})",
            "mix": f"{t} @ self.mix",
            "demean": f"{t} - {t}.mean({3 - ax}, keepdim=True) * 0.5",
            "flip_d": f"{t}.flip(-1)",
            "amax_slot": f"{t} / ({t}.abs().amax(-1, keepdim=True) + 0.1)",
            "amax_all": f"{t} / ({t}.abs().amax() + 0.1)",
            "cumsum_d": f"{t}.cumsum(-1) * 0.5",
            "tiny": f"{t} * {along(f'(torch.arange({r}).double() + 2) * 1e-17')} * 2e16",
            "data": f"{t} * (1 + 0.1 * x.mean())",
            "literal": f"{t} * torch.tensor({literal}, dtype=torch.float64)",
        }[op]
        return [f"{t} = {code}"]

    # -- attention -----------------------------------------------------------------------------

    def mask(self) -> tuple[list[str], str]:
        s, r = self.spec, self.count
        code = {
            "none": "None",
            "causal": "None",
            "slot": f"(self.slot[:{r}] - 1)[None]",
            "age": f"-0.1 * torch.arange({r - 1}, -1, -1).double()[None]",
            "visible": f"self.visible[:{r}][None]",
            "growing": f"(torch.arange({r}) >= {r} - {s.new} * (step % 50 + 1))[None]",
            "triangle": f"torch.ones(n, {r}, dtype=torch.bool).tril({r} - n)",
            "step": f"0.2 * ((torch.arange({r}) + step) % 3).double()[None]",
            "row": "0.1 * torch.arange(n).double()[:, None]",
        }[s.mask]
        lines = [f"mask = {code}"]
        if s.mask in ("none", "causal"):
            return [], "None"
        if s.text and s.mask != "row":
            boolean = s.mask in ("visible", "growing", "triangle")
            lines.append(f"mask = F.pad(mask, ({s.text}, 0), value={'True' if boolean else '0.0'})")
        return lines, "mask"

    def attend(self, out: str, q: str, k: str, v: str) -> list[str]:
        s = self.spec
        lines = [f"kk, vv = {k}, {v}"]
        if s.work == "BSHD":
            lines.append("kk, vv = kk.transpose(1, 2), vv.transpose(1, 2)")
        gqa = ""
        if s.groups > 1:
            if s.group_by == "gqa":
                gqa = ", enable_gqa=True"
            elif s.group_by == "repeat":
                lines.append(f"kk, vv = (z.repeat_interleave({s.groups}, dim=1) for z in (kk, vv))")
            else:
                lines.append(
                    f"kk, vv = (z[:, :, None].expand(-1, -1, {s.groups}, -1, -1).flatten(1, 2) "
                    "for z in (kk, vv))"
                )
        if s.text:
            text = f"self.text_{{}}.expand({s.batch}, -1, -1, -1)"
            if s.groups > 1 and s.group_by != "gqa":
                text += f".repeat_interleave({s.groups}, dim=1)"
            for z in "kv":
                lines.append(f"{z}{z} = torch.cat([{text.format(z)}, {z}{z}], 2)")
        made, mask = self.mask()
        lines += made
        boolean = s.mask in ("visible", "growing", "triangle")
        if s.attention == "sdpa":
            causal = ", is_causal=True" if s.mask == "causal" else ""
            call = f"F.scaled_dot_product_attention({q}, kk, vv, attn_mask={mask}{causal}{gqa})"
            return [*lines, f"{out} = {call}"]
        if s.attention == "einsum":
            lines.append(f'w = torch.einsum("bhqd,bhkd->bhqk", {q}, kk) * {s.dim}**-0.5')
        else:
            lines.append(f"w = {q} @ kk.transpose(2, 3) / {s.dim}**0.5")
        if mask != "None":
            lines.append("w = w.masked_fill(~mask, -1e4)" if boolean else "w = w + mask")
        if s.attention == "by_hand":
            lines += [
                "w = torch.exp(w - w.amax(-1, keepdim=True))",
                f"{out} = (w @ vv) / w.sum(-1, keepdim=True)",
            ]
        elif s.attention == "einsum":
            lines.append(f'{out} = torch.einsum("bhqk,bhkd->bhqd", w.softmax(-1), vv)')
        else:
            lines.append(f"{out} = torch.softmax(w, -1) @ vv")
        return lines

    def view(self, name: str, which: str, c: str) -> list[str]:
        """`name`: cache `c` cut to what is read, in the layout of the work."""
        s = self.spec
        late = s.slice_late or self.layout(which) == "BFTHD"
        if late:
            ax = 1 if s.work == "BSHD" else 2
            return [f"{name} = {self.to_work(which, c)}", f"{name} = {self.cut(name, ax)}"]
        ax = LAYOUTS[self.layout(which)][3]
        return [f"{name} = {self.to_work(which, self.cut(c, ax))}"]

    # -- the model -----------------------------------------------------------------------------

    def stores(self) -> list[str]:
        """Lines of __init__ that make the caches of layer i, and names for the caller's."""
        s = self.spec
        kv = caches(s)
        if s.home == "buffer":
            return [f'self.register_buffer("{n}", start({shape}))' for n, shape in kv.items()]
        if s.home == "submodule":
            return [
                "self.stores = nn.ModuleList(nn.Module() for _ in range(len(CACHES)))",
                *(
                    f'self.stores[{i}].register_buffer("cache", start({shape}))'
                    for i, shape in enumerate(kv.values())
                ),
            ]
        if s.home == "parameter":
            return [
                f"self.{n} = nn.Parameter(start({shape}), requires_grad=False)"
                for n, shape in kv.items()
            ]
        return []

    def handle(self, name: str) -> str:
        s = self.spec
        i = list(caches(s)).index(name)
        return {
            "buffer": f"self.{name}",
            "parameter": f"self.{name}",
            "submodule": f"self.stores[{i}].cache",
            "args": name,
            "dict": f'kv["{name}"]',
            "list": f'kv[{name[1:]}]["{name[0]}"]',
        }[s.home]

    def block(self) -> list[str]:
        s = self.spec
        heads = s.heads * s.groups
        out = [
            "n = x.shape[1]",
            f"q, k, v = self.qkv[i](x).view({s.batch}, n, {heads + 2 * s.heads}, {s.dim})"
            f".split([{heads}, {s.heads}, {s.heads}], 2)",
            f"k_new, v_new = {self.to_cache('k', 'k')}, {self.to_cache('v', 'v')}",
        ]
        if s.dtype != "float64":
            out.append("k_new, v_new = k_new.to(ck.dtype), v_new.to(cv.dtype)")
        write_v = s.write_v or s.write
        out += self.extra_read()

        def writes(k: str, v: str) -> list[str]:
            first = [
                *self.write("k", *s.write, k, "k_new"),
                *self.write("v", *write_v, v, "v_new"),
            ]
            then = [
                *self.write("k", "overwrite", "slice", k, "k_new"),
                *self.write("v", "overwrite", "slice", v, "v_new"),
            ]
            if s.flag == "first":
                return ["if flag:", *_in(first), "else:", *_in(then)]
            if s.passes == 1 or s.later == "same":
                return first
            return [
                "if first:",
                *_in(first),
                "else:",
                *_in(then if s.later == "overwrite" else ["pass"]),
            ]

        after: list[str] = []
        k_read, v_read = "ck", "cv"
        if s.stage == "before":
            out += writes("ck", "cv")
        elif s.stage == "after":
            after = writes("ck", "cv")
        elif s.stage == "clone":
            out += ["wk, wv = ck.clone(), cv.clone()", *writes("wk", "wv")]
            k_read, v_read = "wk", "wv"
            after = ["ck.copy_(wk)", "cv.copy_(wv)"]
        else:
            k_read, v_read = "wk", "wv"
            for z in "kv":
                ax = LAYOUTS[self.layout(z)][3]
                unit = 1 if self.layout(z) == "BFTHD" else s.new
                sink, total = s.sink * unit, (s.frames + s.sink) * unit
                p = Place(f"c{z}", f"{z}_new", ax, str(unit), unit, total, sink)
                keep = [p.at(0, sink)] * bool(sink)
                if s.stage == "cat":
                    out.append(f"w{z} = {p.cat(*keep, p.at(sink + unit, total), p.new)}")
                    after.append(f"c{z}.copy_(w{z})")
                else:
                    out.append(f"w{z} = {p.cat(p.c, p.new)}")
                    after.append(f"c{z}.copy_({p.cat(*keep, p.at(sink + unit, total), p.new)})")
        out += self.view("keys", "k", k_read)
        raw = {"v": ("v", v_read), "key": ("k", k_read), "roped": ("k", k_read)}[s.value]
        out += self.view("values", *raw)
        if s.value == "v" and s.second in ("raw", "other_value"):
            out.append("raw = values")
        elif s.second in ("raw", "other_value"):
            out.append("raw = keys")
        if s.second == "other_rope":
            out.append("other = keys")
        out += self.ops("keys", s.key_ops)
        if s.value == "roped":
            out.append("values = keys")
        out += self.ops("values", s.value_ops)
        if s.flag == "const":
            a, b = ([round(0.5 + 0.1 * ((m * i) % 5), 1) for i in range(s.dim)] for m in (1, 3))
            out.append(f"keys = keys * (torch.tensor({a}) if flag else torch.tensor({b})).double()")
        out.append("q = q.transpose(1, 2)")
        if "rope" in s.key_ops:
            out.append("q = rope(q, ang[-n:])")
        out += self.attend("y", "q", "keys", "values")
        if s.second == "other_rope":
            out += ["turn = ang * 0.5 + 0.1", *self.op("other", "rope", "turn")]
            out += [*self.attend("z", "q", "other", "values"), "y = y + z"]
        elif s.second == "other_value":
            out += [*self.attend("z", "q", "keys", "raw * 0.5"), "y = y + z"]
        elif s.second == "again":
            out += [*self.attend("z", "q.flip(-1)", "keys", "values"), "y = y + z"]
        elif s.second == "raw":
            ax = 1 if s.work == "BSHD" else 2
            mean = f"raw.mean({ax}, keepdim=True)"
            mean = f"{mean}.transpose(1, 2)" if s.work == "BSHD" else mean
            out.append(f"y = y + {mean}.repeat_interleave({s.groups}, dim=1)")
        elif s.second == "old":
            out.append("y = y + z")
        elif s.second == "query":
            ax = 1 if s.work == "BSHD" else 2
            own = f"keys.narrow({ax}, {self.count} - n, n)"
            own = f"{own}.transpose(1, 2)" if s.work == "BSHD" else own
            own = f"{own}.repeat_interleave({s.groups}, dim=1)"
            out += [*self.attend("z", own, "keys", "values"), "y = y + z"]
        out += after
        return [*out, "return x + self.out[i](y.transpose(1, 2).flatten(2)) * 0.5"]

    def extra_read(self) -> list[str]:
        """An attention over what the call found, before it writes."""
        s = self.spec
        if s.second != "old":
            return []
        out = [*self.view("keys", "k", "ck"), *self.view("values", "v", "cv")]
        out += self.ops("keys", s.key_ops)
        return [*out, *self.attend("z", "q.transpose(1, 2)", "keys", "values")]

    def forward(self) -> list[str]:
        s = self.spec
        out = ["ang = self.angles(step, base)"]
        for i in range(1 if s.shared else s.layers):
            for z in "kv":
                if s.stacked >= 0:
                    part = f"{self.handle(f'kv{i}')}.select({s.stacked}, {'kv'.index(z)})"
                else:
                    part = self.handle(f"{z}{i}")
                out.append(f"c{z}{i} = {part}")
        for p in range(s.passes):
            for i in range(s.layers):
                c = 0 if s.shared else i
                out.append(f"x = self.block({i}, x, ck{c}, cv{c}, ang, step, {p == 0}, flag)")
        return [*out, "return x"]

    def text(self) -> str:
        s = self.spec
        args = ["x", "step"]
        if s.extra_int:
            args.append("base")
        if s.flag != "none":
            args.append("flag")
        if s.home == "args":
            args += list(caches(s))
        elif s.home in ("dict", "list"):
            args.append("kv")
        defaults = [] if s.extra_int else ["base = 0"]
        defaults += [] if s.flag != "none" else ["flag = True"]
        width, heads = s.heads * s.dim, s.heads * s.groups
        init = [
            "super().__init__()",
            f"self.qkv = nn.ModuleList(nn.Linear(6, {heads * s.dim + 2 * width}) "
            f"for _ in range({s.layers}))",
            f"self.out = nn.ModuleList(nn.Linear({heads * s.dim}, 6) for _ in range({s.layers}))",
            "self.double()",
            f'self.register_buffer("freq", 0.8 * 0.4 ** torch.arange({s.dim // 2}).double())',
            f'self.register_buffer("gain", torch.rand({s.dim}).double() + 0.5)',
            f'self.register_buffer("head", torch.rand({s.heads}).double() + 0.5)',
            f'self.register_buffer("slot", torch.rand({self.count}).double() + 0.5)',
            f'self.register_buffer("visible", torch.arange({self.count}) % 4 != 1)',
            f'self.register_buffer("order", torch.randperm({self.count}))',
            f'self.register_buffer("mix", torch.randn({s.dim}, {s.dim}).double() / {s.dim}**0.5)',
            f'self.register_buffer("text_k", torch.randn(1, {s.heads}, {max(1, s.text)}, {s.dim}).double())',
            f'self.register_buffer("text_v", torch.randn(1, {s.heads}, {max(1, s.text)}, {s.dim}).double())',
            *self.stores(),
        ]
        start = (
            "torch.randn(*shape).double()"
            if s.start == "normal"
            else "torch.zeros(*shape).double()"
        )
        parts = [
            "import torch\nimport torch.nn.functional as F\nfrom torch import nn\n",
            f"CACHES = {caches(s)!r}\n",
            f"\ndef start(shape):\n    return {start}\n",
            f"\ndef rope(t, ang):{ROPES[s.rope]}\n",
            "\nclass Model(nn.Module):",
            _def("__init__(self)", init),
            _def("angles(self, step, base)", self.positions()),
            _def("block(self, i, x, ck, cv, ang, step, first, flag)", self.block()),
            _def(f"forward(self, {', '.join(args)})", [*defaults, *self.forward()]),
        ]
        return "\n".join(parts) + "\n"


def caches(spec: Spec) -> dict[str, tuple[int, ...]]:
    """Name -> shape of the caches, in the order in which they are passed where they are arguments."""
    out: dict[str, tuple[int, ...]] = {}
    for i in range(1 if spec.shared else spec.layers):
        for z in "kv":
            layout = spec.layout_v or spec.layout if z == "v" else spec.layout
            sizes = {
                "B": spec.batch,
                "S": spec.slots,
                "H": spec.heads,
                "D": spec.dim,
                "E": spec.heads * spec.dim,
                "F": spec.frames + spec.sink,
                "T": spec.new,
            }
            shape = [sizes[a] for a in LAYOUTS[layout][0]]
            if spec.stacked >= 0:
                shape.insert(spec.stacked, 2)
                out[f"kv{i}"] = tuple(shape)
            else:
                out[f"{z}{i}"] = tuple(shape)
    return out


def slot_axis(spec: Spec, name: str) -> int:
    """The slots' axis of cache ``name`` (of its frames, where it has an axis of frames)."""
    layout = spec.layout_v or spec.layout if name[:2] != "kv" and name[0] == "v" else spec.layout
    axis = LAYOUTS[layout][3]
    return axis + (0 <= spec.stacked <= axis)


def source(spec: Spec) -> str:
    return Writer(spec).text()


def _in(lines: list[str]) -> list[str]:
    return ["    " + line for line in lines]


def _def(head: str, body: list[str]) -> str:
    return "\n".join([f"    def {head}:", *("        " + line for line in body), ""])
