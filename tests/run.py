"""Runs the built unit tests, the fuzz corpora and pytest, each in a process with a time limit, and adds up.

python tests/run.py --build build/release [--trainer] [NAME...]: with names, only what holds one of them in its name.
--trainer: instead of these the tests of tests/trainer, which need PyTorch.
"""
import argparse, os, pathlib, re, subprocess, sys, time

LIMIT = 600  # seconds for one unit test program; generous, since sanitizers slow things down


def run(cmd, env=None, limit=LIMIT):
    start = time.monotonic()
    try:
        p = subprocess.run(cmd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=limit, env=env)
        return p.returncode, p.stdout.decode(errors="replace"), time.monotonic() - start
    except subprocess.TimeoutExpired as e:
        return 124, (e.stdout or b"").decode(errors="replace") + f"\ntimed out after {limit} s", limit


def main():
    args = argparse.ArgumentParser()
    args.add_argument("--build", default="build/release")
    args.add_argument("--trainer", action="store_true")
    args.add_argument("names", nargs="*")
    args = args.parse_args()
    build = pathlib.Path(args.build)
    wanted = lambda name: not args.names or any(n in name for n in args.names)
    passed = failed = skipped = 0

    def tell(name, ok, n_pass, n_fail, n_skip, text, secs):
        nonlocal passed, failed, skipped
        if not ok and not n_fail:
            n_fail = 1  # it died before it could count
        passed, failed, skipped = passed + n_pass, failed + n_fail, skipped + n_skip
        print(f"{'ok  ' if ok else 'FAIL'} {name}: {n_pass} passed, {n_fail} failed ({secs:.1f} s)", flush=True)
        if not ok:
            print(text, flush=True)

    env = dict(os.environ, CMOCKA_MESSAGE_OUTPUT="TAP", COPPICE=str(build / "coppice"))
    emulated = build.with_name(build.name + "-emulate")  # the same tests with AVX-512 in plain C
    programs = lambda kind, *builds: [] if args.trainer else [p for b in builds for p in sorted((b / "tests").glob(f"{kind}_*"))]
    for exe in programs("test", build, emulated):
        if exe.suffix or not wanted(exe.name):
            continue
        rc, text, secs = run([str(exe)], env)
        good = len(re.findall(r"^ok ", text, re.M))
        skip = len(re.findall(r"^not ok .*# SKIP", text, re.M))  # so cmocka 1.1 writes it
        bad = len(re.findall(r"^not ok ", text, re.M)) - skip
        name = exe.name + (" (AVX-512 emulated)" if emulated in exe.parents else "")
        tell(name, rc == 0 and bad == 0 and good > 0, good, bad, skip, text, secs)
    for exe in programs("fuzz", build):
        if exe.suffix or not wanted(exe.name):
            continue
        corpus = pathlib.Path("tests/fuzz/corpus") / exe.name.removeprefix("fuzz_")
        files = sorted(p for p in corpus.glob("*") if p.is_file())
        rc, text, secs = run([str(exe), *map(str, files)], env)
        ok = rc == 0 and len(files) > 0
        tell(exe.name, ok, len(files) if ok else 0, 0 if ok else 1, 0, text, secs)
    pytests = sorted(str(p) for p in pathlib.Path("tests").glob("*/test_*.py")
                     if wanted(p.stem) and (p.parent.name == "trainer") == args.trainer)
    if pytests:
        # Coloured or quiet, pytest's closing line holds the counts; print it as it comes, so that a hang shows where.
        p = subprocess.Popen([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--durations=5", *pytests], stdout=subprocess.PIPE,
                             stderr=subprocess.STDOUT, env=env, text=True)
        text = ""
        for line in p.stdout:
            text += line
            print(line, end="", flush=True)
        p.wait()
        count = lambda word: sum(int(n) for n in re.findall(rf"(\d+) {word}", text.splitlines()[-1] if text else ""))
        n_fail = count("failed") + count("errors?")
        passed, skipped = passed + count("passed"), skipped + count("skipped")
        failed += n_fail or (1 if p.returncode else 0)
    if args.names and not passed + failed + skipped:
        print(f"no test of {build} has {' or '.join(args.names)} in its name")
        return 1
    print(f"{passed} passed, {failed} failed" + (f", {skipped} skipped" if skipped else ""))
    return 1 if failed or not passed else 0


sys.exit(main())
