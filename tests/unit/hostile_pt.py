"""Every shape of .pt file that must be refused: name, bytes, words of the message.  Tests and the fuzz corpus use it."""
from pt_writer import *


def tiny(**changes):
    t = model()
    for key, value in changes.items():
        t["transformer.wte.weight" if key == "wte" else key] = value
    return t


def file(tensors=None, pickle=None, **options):
    return archive(entries_of(tensors or tiny(), pickle), **options)


def with_entry(index, **fields):
    entries = entries_of(tiny())
    e = entries[index]
    entries[index] = Entry(fields.pop("path", e.path), fields.pop("data", e.data), **fields)
    return archive(entries)


def plus(*more):
    return archive(entries_of(tiny()) + list(more))


def wte(shape=(16, 8), kind="BFloat16", **parts):
    return file(tiny(wte=Tensor(shape, kind, **parts)))


def overlapping():
    """An entry whose data holds the header of another."""
    entries = entries_of(tiny())
    inner = b"".join([b"PK\3\4", b"\0" * 22, struct.pack("<HH", 6, 0), b"m/evil", b"ab"])
    whole = archive(entries[:1] + [Entry("m/outer", inner)])
    at = whole.index(inner)
    return archive(entries[:1] + [Entry("m/outer", inner), Entry("m/evil", b"ab", local={"at": at})])


def dict_of(body):
    return file(pickle=b"\x80\x02}(" + body + b"u.")


GOOD = file()

ZIP = {
    "no end record": (GOOD[:-22], "no directory at its end"),
    "cut in half": (GOOD[: len(GOOD) // 2], "no directory at its end"),
    "two end records": (file(comment=b"PK\5\6" + b"\0" * 16 + b"\0\0"), "more than one end record"),
    "locator outside": (file(locator=1 << 40), "zip64 locator points outside"),
    "locator wraps": (file(locator=2**64 - 8), "zip64 locator points outside"),
    "locator at nothing": (file(locator=0), "no zip64 end record"),
    "end records disagree": (file(narrow=(3, 0xFFFFFFFF, 0xFFFFFFFF)), "two end records disagree"),
    "count one too large": (file(count=12), "directory is cut off"),
    "count beyond the directory": (file(count=20), "20 entries in a directory of"),
    "absurd count": (file(count=1 << 60), "1152921504606846976 entries"),
    "absurd count in 16 bits": (file(zip64=False, count=65535), "65535 entries"),
    "count too small": (file(count=2), "bytes too many in its directory"),
    "directory outside": (file(directory=1 << 50), "directory lies outside"),
    "directory wraps": (file(directory=2**64 - 16, directory_bytes=64), "directory lies outside"),
    "directory too long": (file(directory_bytes=1 << 40), "directory lies outside"),
    "directory over the data": (file(directory=0), "directory is cut off or damaged"),
    "compressed": (with_entry(2, central={"method": 8}), "is compressed"),
    "compressed in the local header only": (with_entry(2, local={"method": 8}), "is not what the directory says"),
    "two sizes": (with_entry(2, central={"packed": 3}), "yet has two sizes"),
    "encrypted": (with_entry(2, central={"flags": 1}), "is encrypted"),
    "several disks": (file(disk=1), "several disks"),
    "several disks in zip64": (file(disks=2), "several disks"),
    "entry on another disk": (with_entry(2, central={"disk": 1}), "several disks"),
    "duplicate names": (plus(Entry("m/data/0", b"")), 'two entries "m/data/0"'),
    "absolute name": (plus(Entry("/etc/passwd", b"")), 'bad entry name "/etc/passwd"'),
    "name that climbs": (plus(Entry("m/../x", b"")), 'bad entry name "m/../x"'),
    "backslash": (plus(Entry("m/a\\b", b"")), "bad entry name"),
    "NUL in a name": (plus(Entry(b"m/a\0b", b"")), 'bad entry name "m/a?b"'),
    "two roots": (plus(Entry("other/x", b"")), 'bad entry name "other/x"'),
    "no root": (archive([Entry("data.pkl", b"N.")]), 'bad entry name "data.pkl"'),
    "name of 300 bytes": (plus(Entry("m/" + "x" * 298, b"")), "bad entry name"),
    "local signature": (with_entry(2, local={"magic": 0x12345678}), "is not what the directory says"),
    "local name differs": (with_entry(2, local={"name": b"m/data/9"}), "is not what the directory says"),
    "central signature": (with_entry(2, central={"magic": 0x12345678}), "directory is cut off or damaged"),
    "data beyond the directory": (with_entry(2, central={"size": 1 << 20}), "reaches beyond its data"),
    "size wraps": (with_entry(2, central={"size": 2**64 - 1}), "reaches beyond its data"),
    "header beyond the directory": (with_entry(2, central={"header": 1 << 30}), "lies outside of its data"),
    "header wraps": (with_entry(2, central={"header": 2**64 - 4}), "lies outside of its data"),
    "zip64 field too short": (with_entry(2, zip64=True, central={"wide": 8}), "lacks its 64-bit sizes"),
    "zip64 field cut off": (with_entry(2, zip64=True, central={"wide": 999}), "lacks its 64-bit sizes"),
    "local extra beyond the data": (with_entry(-1, local={"extra": 65535}), "reaches beyond its data"),
    "overlapping entries": (overlapping(), "overlaps another"),
    "no data.pkl": (archive(entries_of(tiny())[1:]), "has no data.pkl"),
    "no entries": (archive([]), "does not start as a ZIP archive"),
    "missing storage": (archive([e for e in entries_of(tiny()) if e.path != b"m/data/3"]), 'the storage "data/3" of tensor'),
    "big-endian": (archive(entries_of(tiny(), byteorder=b"big")), "byte order is not little-endian"),
    "empty": (b"", "does not start as a ZIP archive"),
    "one byte": (b"P", "does not start as a ZIP archive"),
    "legacy torch": (bytes.fromhex("80028a0a6cfc9c46f9206aa850192e") + b"\0" * 99, "torch's format from before 1.6"),
    "tar": (b"model.bin".ljust(257, b"\0") + b"ustar\0".ljust(300, b"\0"), "is a tar archive"),
    "gguf": (b"GGUF\3\0\0\0" + b"\0" * 64, "is a GGUF file"),
    "safetensors": (struct.pack("<Q", 2) + b"{}" + b"\0" * 64, "is a safetensors file"),
}

ONE = Tensor([1]).pickled("0")
PICKLE = {
    "os.system": (dict_of(text("a") + name("os", "system") + text("id") + b"\x85R"), '"os.system"'),
    "builtins.eval": (dict_of(text("a") + name("builtins", "eval") + text("1") + b"\x85R"), '"builtins.eval"'),
    "torch.load": (dict_of(text("a") + name("torch", "load") + b")R"), '"torch.load"'),
    "codecs.encode": (dict_of(text("a") + name("_codecs", "encode") + b")R"), '"_codecs.encode"'),
    "whole module": (file(pickle=b"\x80\x02" + name("torch.nn.modules.linear", "Linear") + b")\x81."), '"torch.nn.modules.linear.Linear"'),
    "sparse tensor": (dict_of(text("a") + name("torch._utils", "_rebuild_sparse_tensor") + b")R"), "_rebuild_sparse_tensor"),
    "meta tensor": (dict_of(text("a") + name("torch._utils", "_rebuild_meta_tensor_no_storage") + b")R"), "_rebuild_meta_tensor_no_storage"),
    "INST": (file(pickle=b"\x80\x02(ios\nsystem\n."), "opcode INST"),
    "no STOP": (file(pickle=b"\x80\x02}"), "without a STOP"),
    "a list": (file(pickle=b"\x80\x02]."), "not a state dict: data.pkl holds no dict"),
    "a number": (file(pickle=b"\x80\x02K\x01."), "not a state dict: data.pkl holds no dict"),
    "nested dicts": (dict_of(text("model") + b"}"), 'not a state dict: the value of "model" is no tensor'),
    "key is bytes": (dict_of(b"C\1a" + ONE), "a key that is no tensor name"),
    "key with a newline": (dict_of(text("a\nb") + ONE), "a key that is no tensor name"),
    "key with NUL": (dict_of(text("a\0b") + ONE), "a key that is no tensor name"),
    "empty key": (dict_of(text("") + ONE), "a key that is no tensor name"),
    "key of 300 bytes": (dict_of(text("x" * 300) + ONE), "a key that is no tensor name"),
    "duplicate tensor names": (dict_of(text("lm_head.weight") + Tensor([1], "BFloat16", numel=128).pickled("0") + text("lm_head.weight")
                                       + Tensor([1], "BFloat16", numel=128).pickled("0")), 'two tensors "lm_head.weight"'),
    "names equal after the prefix": (file({**tiny(), "_orig_mod.lm_head.weight": Tensor([16, 8], "BFloat16")}), 'two tensors "lm_head.weight"'),
    "class called as a tensor": (dict_of(text("a") + name("torch", "FloatStorage") + b")R"), "is no tensor"),
    "OrderedDict of arguments": (file(pickle=b"\x80\x02" + name("collections", "OrderedDict") + b"]\x85R."), "holds no dict"),
    "no arguments": (dict_of(text("a") + name("torch._utils", "_rebuild_tensor_v2") + b")R"), "unknown arguments"),
    "too many arguments": (wte(more=b"}N"), "unknown arguments"),
    "hooks": (wte(hooks=b"N"), "unknown arguments"),
    "hooks that hold something": (wte(hooks=EMPTY_HOOKS + text("a") + b"Ns"), "unknown arguments"),
    "conjugate": (wte(more=b"}" + text("conj") + b"\x88s"), "conjugate or negative view"),
}

TENSOR = {
    "five dimensions": (wte([1, 1, 1, 16, 8]), "more than 4 dimensions"),
    "negative size": (wte([-16, -8], data=b"\0" * 256, numel=128, strides=[8, 1]), "negative size or stride"),
    "sizes overflow": (wte([1 << 40, 1 << 40], data=b"\0" * 256, numel=128, strides=[1 << 40, 1]), "overflow"),
    "sizes overflow to zero": (wte([1 << 32, 1 << 32], data=b"\0" * 256, numel=128, strides=[1 << 32, 1]), "overflow"),
    "empty": (wte([0, 8], numel=0), "is empty"),
    "negative stride": (wte(strides=[-8, 1]), "negative size or stride"),
    "stride 0": (wte(strides=[0, 1]), "not contiguous"),
    "transposed": (wte(strides=[1, 16]), "not contiguous"),
    "strides too few": (wte(strides=[1]), "malformed sizes"),
    "negative offset": (wte(offset=-1), "reaches beyond its storage"),
    "offset too large": (wte(offset=1), "reaches beyond its storage"),
    "offset beyond 2^62": (wte(offset=2**62), "reaches beyond its storage"),
    "numel too large": (wte(numel=129), "has 256 bytes, yet 129 elements"),
    "numel negative": (wte(numel=-128), "has 256 bytes, yet -128 elements"),
    "storage too small": (wte(data=b"\0" * 254), "has 254 bytes, yet 128 elements"),
    "half an element too many": (wte(data=b"\0" * 257), "has 257 bytes, yet 128 elements"),
    "key not decimal": (wte(key="../1"), "names a storage that is no number"),
    "key too long": (wte(key="1" * 30), "names a storage that is no number"),
    "key unknown": (wte(key="99"), 'the storage "data/99"'),
    "integers": (wte(kind="Long"), "torch LongStorage"),
    "unknown storage": (wte(storage="QInt8Storage", kind="Half"), '"torch.QInt8Storage"'),
    "overlapping tensors": (file({f"t{i}": Tensor([600], key="0", data=None if i else b"\0" * 2400) for i in range(9)}), "the tensors overlap"),
}

ALL = {**{f"zip: {k}": v for k, v in ZIP.items()}, **{f"pickle: {k}": v for k, v in PICKLE.items()},
       **{f"tensor: {k}": v for k, v in TENSOR.items()}}
