"""Tensors out of a checkpoint, without torch, and the messages that send them to a worker."""
import collections
import ctypes
import io
import math
import pickle
import struct
import zipfile

START, EARLY = "tests/models/calc-d4", "tests/models/calc-d4-early"  # two sets for one architecture
FILES = {START: f"{START}/model_005426.pt", EARLY: f"{EARLY}/model_000110.pt"}

DTYPES = ["F32", "BF16", "F16", "F64"]  # in the order of their numbers in the digest
STORAGES = {"FloatStorage": "F32", "BFloat16Storage": "BF16", "HalfStorage": "F16", "DoubleStorage": "F64"}
SIZES = {"F32": 4, "BF16": 2, "F16": 2, "F64": 8}

Tensor = collections.namedtuple("Tensor", "name dtype shape data")


class Unpickler(pickle.Unpickler):
    """Storages become (dtype, key), tensors (dtype, key, shape)."""

    def find_class(self, module, name):
        if name in STORAGES:
            return STORAGES[name]
        if name == "_rebuild_tensor_v2":
            return lambda storage, offset, shape, *_: (*storage, shape)
        return {"OrderedDict": collections.OrderedDict}[name]

    def persistent_load(self, id):
        _, dtype, key, *_ = id
        return dtype, key


def tensors_of(path):
    """All tensors of a .pt file, in the order in which they are sent."""
    with zipfile.ZipFile(path) as z:
        root = z.namelist()[0].split("/")[0]
        state = Unpickler(io.BytesIO(z.read(f"{root}/data.pkl"))).load()
        tensors = [Tensor(name.removeprefix("_orig_mod."), dtype, list(shape),
                          z.read(f"{root}/data/{key}")[:SIZES[dtype] * math.prod(shape)])
                   for name, (dtype, key, shape) in state.items()]
    return sorted(tensors, key=lambda t: t.name.encode())


class Hash(ctypes.Structure):
    _fields_ = [("low", ctypes.c_uint64), ("high", ctypes.c_uint64)]


xxh3 = ctypes.CDLL("libxxhash.so.0").XXH3_128bits
xxh3.argtypes, xxh3.restype = [ctypes.c_char_p, ctypes.c_size_t], Hash


def digest_of(tensors):
    covered = b"".join(t.name.encode() + b"\0" + struct.pack(f"<{2 + len(t.shape)}Q", DTYPES.index(t.dtype), len(t.shape), *t.shape)
                       + t.data for t in tensors)
    h = xxh3(covered, len(covered))
    return f"{h.high:016x}{h.low:016x}"


def begin_stream(client, version, tensors, **keys):
    source = {"stream": {"tensors": len(tensors), "bytes": sum(len(t.data) for t in tensors)}}
    return client.send("weights", version=version, source=source, **keys)


def send_chunks(client, target, tensors, chunk_bytes=1 << 20):
    for t in tensors:
        step = max(chunk_bytes // SIZES[t.dtype], 1) * SIZES[t.dtype]
        for offset in range(0, len(t.data), step):
            client.send("weights_chunk", target=target, name=t.name, dtype=t.dtype, shape=t.shape, offset=offset,
                        data=t.data[offset:offset + step])


def send_stream(client, version, tensors, chunk_bytes=1 << 20, digest=None, **keys):
    """A whole update; the ids of the request and of its commit, which both get a reply."""
    id = begin_stream(client, version, tensors, **keys)
    send_chunks(client, id, tensors, chunk_bytes)
    return id, client.send("weights_commit", target=id, digest=digest or digest_of(tensors))
