"""Writes .pt files byte by byte, good ones and broken ones: the container, the pickle in it, a tiny model."""
import struct

SIZES = {"Float": 4, "BFloat16": 2, "Half": 2, "Double": 8, "Long": 8}


# ---- Pickle, protocol 2 without a memo.

def text(s):
    raw = s if isinstance(s, bytes) else s.encode()
    return b"X" + struct.pack("<I", len(raw)) + raw


def number(n):
    if -(2**31) <= n < 2**31:
        return b"J" + struct.pack("<i", n)
    raw = n.to_bytes(n.bit_length() // 8 + 1, "little", signed=True)
    return b"\x8a" + bytes([len(raw)]) + raw


def name(module, attribute):
    return f"c{module}\n{attribute}\n".encode()


def numbers(values):
    return b"(" + b"".join(map(number, values)) + b"t"


EMPTY_HOOKS = name("collections", "OrderedDict") + b")R"


def row_major(shape):
    strides, n = [], 1
    for size in reversed(shape):
        strides.insert(0, n)
        n *= max(size, 1)
    return strides


class Tensor:
    """One tensor of a state dict.  Every part can be set to something wrong."""

    def __init__(self, shape, kind="Float", **parts):
        self.shape, self.kind, self.parts = list(shape), kind, parts
        n = 1
        for size in shape:
            n *= size
        self.n = n
        self.data = parts["data"] if "data" in parts else b"\0" * (n * SIZES[kind])

    def pickled(self, key):
        p = self.parts
        storage = (b"(" + text("storage") + name("torch", p.get("storage", self.kind + "Storage")) + text(p.get("key", key))
                   + text("cpu") + number(p.get("numel", self.n)) + b"tQ")
        return (p.get("rebuild", name("torch._utils", "_rebuild_tensor_v2")) + b"(" + storage + number(p.get("offset", 0))
                + numbers(self.shape) + numbers(p.get("strides", row_major(self.shape))) + b"\x89"
                + p.get("hooks", EMPTY_HOOKS) + p.get("more", b"") + b"tR")


def state_dict(tensors, head=b"\x80\x02}(", tail=b"u."):
    return head + b"".join(text(k) + t.pickled(str(i)) for i, (k, t) in enumerate(tensors.items())) + tail


# ---- ZIP.

class Entry:
    """One entry.  `local` and `central` replace fields of its headers."""

    def __init__(self, path, data, local=None, central=None, zip64=False):
        raw = path if isinstance(path, bytes) else path.encode()
        self.path, self.data, self.zip64 = raw, data, zip64
        self.local, self.central = local or {}, central or {}


def archive(entries, zip64=True, comment=b"", **wrong):
    """The bytes of an archive as torch lays it out: descriptors, padding to 64 bytes, zip64 records."""
    out, directory = b"", b""
    for e in entries:
        at = e.local.get("at", len(out))
        local_name = e.local.get("name", e.path)
        pad = -(len(out) + 30 + len(local_name) + 4) % 64
        extra = struct.pack("<HH", 0x4246, pad) + b"Z" * pad
        if "at" not in e.local:
            out += struct.pack("<IHHHHHIIIHH", e.local.get("magic", 0x04034B50), 0, e.local.get("flags", 0x0808),
                               e.local.get("method", 0), 0, 0, 0, 0, 0, len(local_name), e.local.get("extra", len(extra)))
            out += local_name + extra + e.data + struct.pack("<4sIII", b"PK\7\10", 0, len(e.data), len(e.data))
        c = {"size": len(e.data), "packed": e.central.get("size", len(e.data)), "header": at, **e.central}
        wide, fields = b"", []
        for field in ("size", "packed", "header"):
            if e.zip64 or c[field] >= 0xFFFFFFFF:
                wide += struct.pack("<Q", c[field])
                fields.append(0xFFFFFFFF)
            else:
                fields.append(c[field])
        extra = struct.pack("<HH", 1, c.get("wide", len(wide))) + wide if wide else b""
        extra = struct.pack("<HH", 0x4246, 2) + b"ZZ" + extra
        directory += struct.pack("<IHHHHHHIIIHHHHHII", c.get("magic", 0x02014B50), 0, 0, c.get("flags", 0x0808),
                                 c.get("method", 0), 0, 0, 0, fields[1], fields[0], len(e.path), len(extra), 0,
                                 c.get("disk", 0), 0, 0, fields[2]) + e.path + extra
    count = wrong.get("count", len(entries))
    at, size = wrong.get("directory", len(out)), wrong.get("directory_bytes", len(directory))
    out += directory
    end64 = len(out)
    if zip64:
        out += struct.pack("<IQHHIIQQQQ", 0x06064B50, 44, 0, 0, wrong.get("disk64", 0), 0, count, count, size, at)
        out += struct.pack("<IIQI", 0x07064B50, 0, wrong.get("locator", end64), wrong.get("disks", 1))
    narrow = wrong.get("narrow", (min(count, 0xFFFF), min(size, 0xFFFFFFFF), min(at, 0xFFFFFFFF)))
    end = struct.pack("<IHHHHIIH", 0x06054B50, wrong.get("disk", 0), 0, narrow[0], narrow[0], narrow[1], narrow[2],
                      len(comment)) + comment
    return out + wrong.get("end", end)


def entries_of(tensors, pickle=None, root="m", byteorder=b"little"):
    """The entries of a torch.save of these tensors."""
    entries = [Entry(f"{root}/data.pkl", state_dict(tensors) if pickle is None else pickle)]
    if byteorder is not None:
        entries.append(Entry(f"{root}/byteorder", byteorder))
    for i, t in enumerate(tensors.values()):
        if t.data is not None:
            entries.append(Entry(f"{root}/data/{i}", t.data))
    entries.append(Entry(f"{root}/version", b"3\n"))
    return entries


# ---- The smallest model: generation A, one layer of width 8, two heads, 16 ids.

CONFIG = {"sequence_len": 32, "vocab_size": 16, "n_layer": 1, "n_head": 2, "n_kv_head": 2, "n_embd": 8}


def model(generation="A", n_layers=1, rows=16, dim=8, heads=2, kv_heads=2):
    """The tensors of a tiny model of that generation."""
    kv = dim // heads * kv_heads
    t = {"transformer.wte.weight": Tensor([rows, dim], "BFloat16"), "lm_head.weight": Tensor([rows, dim], "BFloat16")}
    for i in range(n_layers):
        h = f"transformer.h.{i}."
        for part, shape in (("attn.c_q", (dim, dim)), ("attn.c_k", (kv, dim)), ("attn.c_v", (kv, dim)),
                            ("attn.c_proj", (dim, dim)), ("mlp.c_fc", (4 * dim, dim)), ("mlp.c_proj", (dim, 4 * dim))):
            t[h + part + ".weight"] = Tensor(shape, "BFloat16")
        if generation in "DEF" and i % 2 == (n_layers - 1) % 2:
            t[h + "attn.ve_gate.weight"] = Tensor([kv_heads, 32 if generation == "D" else 12], "BFloat16")
            t[f"value_embeds.{i}.weight"] = Tensor([rows, kv], "BFloat16")
    if generation in "BCDEF":
        t["resid_lambdas"], t["x0_lambdas"] = Tensor([n_layers]), Tensor([n_layers])
    if generation == "F":
        t["smear_gate.weight"] = Tensor([1, 24])
        t["smear_lambda"], t["backout_lambda"] = Tensor([1]), Tensor([1])
    return t
