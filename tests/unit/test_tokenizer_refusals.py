"""Each tokenizer.pkl of the fuzz corpus, through the command: what is right works, what is wrong is told and why."""
import json
import os
import pathlib
import subprocess

import pytest

COPPICE = os.environ.get("COPPICE", "build/coppice")
CORPUS = pathlib.Path("tests/fuzz/corpus/tokenizer_pkl")
GOOD = {"good", "good_three_digits", "protocol_5"}


@pytest.mark.parametrize("path", sorted(CORPUS.iterdir()), ids=lambda p: p.name)
def test_tokenizer_pkl(path):
    p = subprocess.run([COPPICE, "tokenize", "--tokenizer", str(path)], input='{"text": "the 1234"}\n', capture_output=True,
                       text=True, timeout=60)
    if path.name in GOOD:
        digits = [49, 50, 51, 52]
        assert p.returncode == 0 and json.loads(p.stdout)["tokens"] == [257, 32, *digits]
    else:
        assert p.returncode == 1 and p.stdout == "" and p.stderr.count("\n") == 1
        assert p.stderr.startswith(f'coppice: could not open the tokenizer "{path}": ') and len(p.stderr.strip()) > 80
