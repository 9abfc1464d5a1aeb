"""Client for the Coppice rollout worker.

    from coppice import Client

    with Client("tcp://127.0.0.1:5555") as client:
        for sample in client.rollout(["Once upon a time"], n=8, max_tokens=64, text=True):
            print(sample.sample, sample.finish, sample.text)
"""
from .client import Client, Rollout
from .dataset import Record, read_dataset, read_shard
from .errors import (Asleep, BadRequest, ConnectionLost, CoppiceError, Draining, DuplicateId, InternalError, ModelError,
                     NotFound, Overloaded, ProtocolError, RequestTimeout, Timeout, TooLarge, TooLong, UnknownType,
                     Unsupported, WorkerChanged, WorkersDiffer)
from .sample import Sample, Score, Scores, Text, ToolCall, WeightsRun

__version__ = "0.1.0"

__all__ = ["Asleep", "BadRequest", "Client", "ConnectionLost", "CoppiceError", "Draining", "DuplicateId", "InternalError",
           "ModelError", "NotFound", "Overloaded", "ProtocolError", "Record", "RequestTimeout", "Rollout", "Sample", "Score", "Scores",
           "Text", "Timeout", "ToolCall", "TooLarge", "TooLong", "UnknownType", "Unsupported", "WeightsRun", "WorkerChanged", "WorkersDiffer",
           "read_dataset", "read_shard"]
