"""`python -m fuzz`: draw cases by number, compare each with the loop, shrink what differs."""

import argparse
import collections
import json
import pathlib
import subprocess
import sys
import tempfile
import threading
import time

import tqdm

from .families import FAMILIES, NOT_YET

SILENT = 60.0  # seconds without a word after which a worker is taken for dead
MANY = 4  # programs that differ in one manner; a worker leaves further ones as they are
EVERY = 5.0  # seconds between lines of a log


def options_of(argv):
    parser = argparse.ArgumentParser(prog="fuzz", description=__doc__)
    parser.add_argument("--count", type=int, default=1000, help="how many cases")
    parser.add_argument(
        "--seed", type=int, default=0, help="the number of the first case: a run goes on where another ended"
    )
    parser.add_argument("--backend", choices=["native", "mxnet"], default="mxnet")
    parser.add_argument("--face", choices=["gluon", "cavs"], default="gluon")
    parser.add_argument("--jobs", type=int, default=2, help="how many processes")
    parser.add_argument(
        "--without",
        default="",
        help="families that are not drawn, by commas; 'not yet' is a list of them: " + ", ".join(FAMILIES),
    )
    parser.add_argument(
        "--shrink", type=float, default=40.0, help="seconds for making one program smaller; 0: as it is"
    )
    parser.add_argument("--programs", default="", help="a folder for programs that differ")
    parser.add_argument("--show", action="store_true", help="print the program of --seed, and what differs")
    parser.add_argument("--worker", nargs=2, type=int, metavar=("START", "STEP"), help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def families_of(options):
    left_out = {name.strip() for name in options.without.split(",") if name.strip()}
    if "not yet" in left_out:
        left_out |= set(NOT_YET)
    unknown = left_out - set(FAMILIES) - {"not yet"}
    if unknown:
        sys.exit(f"fuzz: there is no family {sorted(unknown)}; there are: {', '.join(FAMILIES)}")
    return [name for name in FAMILIES if name not in left_out]


# ---- a worker --------------------------------------------------------------------------------


def work(options):
    """Run cases START, START+STEP, ..: a line of JSON before and after each."""
    import warnings

    from .oracle import Case, manner_of
    from .shrink import shrink

    warnings.simplefilter("ignore")
    out, sys.stdout = sys.stdout, sys.stderr

    def say(**facts):
        print(json.dumps(facts), file=out, flush=True)

    seen = collections.Counter()
    start, step = options.worker
    for seed in range(start, options.seed + options.count, step):
        say(begin=seed)
        case = Case(seed, options.face, options.backend, families_of(options))
        say(drawn=seed, found=told(case.source, case.options, ("the process", "", "", "")))
        found = case.run()
        say(end=seed, error="error" in case.loop, found=found and told(case.source, case.options, found[0]))
        if found and options.shrink:
            seen[manner_of(found[0])] += 1
            seconds = options.shrink if seen[manner_of(found[0])] <= MANY else 0.0
            smaller = shrink(
                case.source, case.options, found[0], case.differences, seconds, lambda seed=seed: say(alive=seed)
            )
            say(smaller=seed, found=told(*smaller, found[0]))


def told(source, options, difference):
    from .oracle import manner_of
    from .shrink import pasted

    return {
        "manner": manner_of(difference),
        "name": difference[1],
        "loop": str(difference[2])[:300],
        "scope": str(difference[3])[:300],
        "source": source,
        "program": pasted(source, options),
        "options": options,
    }


class Worker:
    """A process that is started again behind a case that killed it."""

    def __init__(self, options, argv, start, tell):
        self.options, self.argv, self.next, self.tell = options, argv, start, tell
        self.thread = threading.Thread(target=self.watch, daemon=True)
        self.thread.start()

    def watch(self):
        step = self.options.jobs
        while self.next < self.options.seed + self.options.count:
            errors = tempfile.TemporaryFile("w+", errors="replace")
            process = subprocess.Popen(
                [sys.executable, "-m", "fuzz", *self.argv, "--worker", str(self.next), str(step)],
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
            at = self.next
            alarm = self.alarm(process)
            drawn, waiting = (
                None,
                None,
            )  # waiting: what differs, as it was drawn, until it is smaller or the attempt has killed the process
            for line in process.stdout:
                alarm.cancel()
                facts = json.loads(line)
                at = facts.get("begin", at)
                drawn = None if "begin" in facts else facts["found"] if "drawn" in facts else drawn
                if "end" in facts:
                    self.next = facts["end"] + step
                    if facts["found"] and self.options.shrink:
                        waiting = facts
                    else:
                        self.tell(facts)
                if "smaller" in facts:
                    self.tell({**waiting, "found": facts["found"]})
                    waiting = None
                alarm = self.alarm(process)
            alarm.cancel()
            process.wait()
            if waiting:
                self.tell(waiting)
            elif process.returncode and at >= self.next:
                how = "was silent" if process.returncode == -9 else f"ended with {process.returncode}"
                errors.seek(0)
                drawn = drawn and {**drawn, "manner": f"the process {how}", "scope": errors.read()[-700:]}
                self.tell({"end": at, "error": False, "found": drawn, "killed": not drawn})
                self.next = at + step

    def alarm(self, process):
        timer = threading.Timer(SILENT, process.kill)
        timer.daemon = True
        timer.start()
        return timer


# ---- all of them -----------------------------------------------------------------------------


def run(options, argv):
    told = collections.deque()
    begun, last, errors, found, killed = time.monotonic(), 0.0, 0, [], []
    families_of(options)
    workers = [Worker(options, argv, options.seed + k, told.append) for k in range(options.jobs)]
    terminal = sys.stderr.isatty()
    bar = tqdm.tqdm(total=options.count, disable=not terminal, unit="case")
    count = 0
    while told or any(w.thread.is_alive() for w in workers):
        while told:
            facts = told.popleft()
            count += 1
            errors += facts["error"]
            bar.update()
            if facts.get("killed"):
                killed.append(facts["end"])
            if facts["found"]:
                found.append((facts["end"], facts["found"]))
                report(options, facts["end"], facts["found"])
        if not terminal and time.monotonic() - last > EVERY:
            last = time.monotonic()
            print(f"{count} of {options.count} cases in {last - begun:.0f} s, {len(found)} differ", flush=True)
        time.sleep(0.05)
    bar.close()
    print(
        f"{count} cases from {options.seed} on {options.backend}, {options.face}, in {time.monotonic() - begun:.0f} s: "
        f"{len(found)} differ; {errors} ended with an error in the loop; "
        f"MXNet killed the process in {len(killed)} {killed}"
    )
    for manner, times in collections.Counter(facts["manner"] for _, facts in found).most_common():
        print(f"{times:6} {manner}")
    return 1 if found else 0


def report(options, seed, facts):
    tqdm.tqdm.write(
        f"\n--- case {seed} ({options.face}, {options.backend}): {facts['manner']}: {facts['name']} "
        f"{facts['options']}\n"
        f"loop:  {facts['loop']}\nscope: {facts['scope']}\n{facts['source']}"
    )
    if options.programs:
        folder = pathlib.Path(options.programs)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{options.face}_{options.backend}_{seed}.py").write_text(facts["program"])


def show(options):
    from .oracle import Case
    from .shrink import pasted

    case = Case(options.seed, options.face, options.backend, families_of(options))
    print(pasted(case.source, case.options))
    for kind, name, want, got in case.run():
        print(f"# {kind}: {name}: loop {want}, scope {got}")


def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    options = options_of(argv)
    if options.worker:
        return work(options)
    return show(options) if options.show else run(options, argv)


if __name__ == "__main__":
    sys.exit(main())
