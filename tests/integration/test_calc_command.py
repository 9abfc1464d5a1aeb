"""coppice calc: exit codes, streams, and JSON Lines in and out."""
import json
import os
import select
import subprocess

import zstandard

COPPICE = os.environ.get("COPPICE", "build/coppice")


def calc(*args, stdin=""):
    return subprocess.run([COPPICE, "calc", *args], input=stdin, capture_output=True, text=True, timeout=60)


def test_one_expression_is_printed():
    p = calc("3*4")
    assert (p.returncode, p.stdout, p.stderr) == (0, "12\n", "")


def test_an_expression_may_begin_with_a_minus():
    assert calc("-7//2").stdout == "-4\n"
    assert calc("--", "--5").stdout == "5\n"


def test_no_output_is_told_on_stderr():
    p = calc("1/0")
    assert (p.returncode, p.stdout, p.stderr) == (1, "", "no output\n")


def test_wrong_use_is_status_2():
    p = calc("1", "2")
    assert (p.returncode, p.stdout) == (2, "")
    assert p.stderr == 'coppice calc: unexpected argument "2": at most 1 can be given\n'
    p = calc("--hlep")
    assert (p.returncode, p.stdout) == (2, "")
    assert p.stderr == 'coppice calc: unknown option "--hlep": did you mean "--help"?\n'


def test_help_about_a_command_is_its_own():
    coppice = lambda *args: subprocess.run([COPPICE, *args], capture_output=True, text=True, timeout=60)
    p = coppice("help", "calc")
    assert (p.returncode, p.stdout, p.stderr) == (0, calc("--help").stdout, "")
    p = coppice("help", "clac")
    assert (p.returncode, p.stdout, p.stderr) == (2, "", 'coppice: unknown command "clac": did you mean "calc"?\n')
    p = coppice("frob")
    assert (p.returncode, p.stdout, p.stderr) == (2, "", 'coppice: unknown command "frob": `coppice --help` lists them\n')


def test_help_has_an_example_that_works():
    p = calc("--help")
    assert p.returncode == 0 and p.stderr == ""
    assert "coppice calc '(1 + 2) * 3.5'" in p.stdout
    assert calc("(1 + 2) * 3.5").stdout == "10.5\n"


def test_json_lines_hold_the_reference_answers():
    with open("tests/golden/calculator.jsonl", encoding="utf-8") as f:
        golden = [json.loads(line) for line in f]
    p = calc(stdin="".join(json.dumps({"expr": g["expr"]}) + "\n" for g in golden))
    assert p.returncode == 0 and p.stderr == ""
    assert [json.loads(line) for line in p.stdout.splitlines()] == golden


def test_a_bad_line_is_reported_and_the_run_goes_on():
    p = calc(stdin='{"expr": "1+1"}\nnonsense\n{"expr": 3}\n{}\n{"expr": "2*3"}\n')
    lines = [json.loads(line) for line in p.stdout.splitlines()]
    assert p.returncode == 1
    assert lines[0] == {"expr": "1+1", "result": "2"}
    assert lines[1]["line"] == 2 and "invalid JSON" in lines[1]["error"]
    assert lines[2] == {"line": 3, "error": "expr: must be a string"}
    assert lines[3]["line"] == 4 and lines[3]["error"].startswith("expr: is missing")
    assert lines[4] == {"expr": "2*3", "result": "6"}


def test_a_character_nul_is_no_end_of_the_expression():
    p = calc(stdin='{"expr": "1+1\\u0000"}\n')
    assert json.loads(p.stdout) == {"expr": "1+1\0", "result": None}
    assert p.returncode == 0


def test_output_that_cannot_be_written_is_status_1():
    with open("/dev/full", "w") as full:
        for args in (["3*4"], []):
            p = subprocess.run([COPPICE, "calc", *args], input='{"expr": "1"}\n', stdout=full,
                               stderr=subprocess.PIPE, text=True, timeout=60)
            assert p.returncode == 1
            assert "could not write the output" in p.stderr


def test_json_lines_may_be_compressed():
    lines = "".join(json.dumps({"expr": f"{i}*2"}) + "\n" for i in range(1000)).encode()
    packed = zstandard.compress(lines[:7000]) + zstandard.compress(lines[7000:])
    run = lambda data: subprocess.run([COPPICE, "calc"], input=data, capture_output=True, timeout=60)
    p = run(packed)
    assert (p.returncode, p.stderr) == (0, b"")
    assert [json.loads(line)["result"] for line in p.stdout.splitlines()] == [str(2 * i) for i in range(1000)]
    torn = run(packed[:-5])
    assert torn.returncode == 1 and p.stdout.startswith(torn.stdout)  # what was whole is answered
    assert b'could not read input "stdin" to its end' in torn.stderr


def test_each_line_is_answered_before_the_next_one_is_written():
    with subprocess.Popen([COPPICE, "calc"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0) as p:
        for i in range(3):
            p.stdin.write(b'{"expr": "%d+1"}\n' % i)
            ready, _, _ = select.select([p.stdout], [], [], 30)
            assert ready, "no answer within 30 s"
            assert json.loads(p.stdout.readline())["result"] == str(i + 1)
        p.stdin.close()
        assert p.wait(30) == 0
