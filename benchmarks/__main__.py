"""Measure, keep the results, and write the tables and pictures of docs/performance.md.

    ./dev bench [NAME…] [--quick]
    ./dev bench check [NAME…] [--quick]    exits 3 when a bar is missed (quick: by a factor of 3)
    ./dev bench page                       measures nothing; writes the page from what was kept

Exits 1 when a measure itself fails.  Peers that are not on the machine are named as skipped.
The disk is that of TMPDIR, else /tmp.
"""

import argparse
import sys
from collections.abc import Callable
from enum import Enum, auto
from pathlib import Path

from measures import peers, report, server, waiting
from measures.rig import MissingError, Plan, Result

MEASURES: dict[str, Callable[[Plan], Result]] = {
    "throughput": server.throughput,
    "renewals": server.renewals,
    "renew_many": server.renew_many,
    "latency": server.latency,
    "tail": server.tail,
    "flushes": server.flushes,
    "stored": server.stored,
    "reads": server.reads,
    "hand_over": waiting.hand_over,
    "crowd": waiting.crowd,
    "idle_streams": waiting.idle_streams,
    "start": server.start,
    "etcd": peers.etcd,
    "postgresql": peers.postgresql,
    "redis": peers.redis,
    "redis_py": peers.redis_py,
}


def main() -> int:
    width = max(map(len, MEASURES))
    measures = "\n".join(f"  {name:<{width}}  {_about(name)}" for name in MEASURES)
    parser = argparse.ArgumentParser(
        prog="./dev bench",
        description=__doc__,
        epilog=f"measures:\n{measures}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="all measures unless named")
    parser.add_argument("--quick", action="store_true", help="short runs; nothing is kept")
    options = parser.parse_intermixed_args()
    command = options.names[0] if options.names[:1] in (["check"], ["page"]) else ""
    names = options.names[1:] if command else options.names
    unknown = [name for name in names if name not in MEASURES]
    if unknown:
        parser.error(f"there is no measure {', '.join(unknown)}; there are {', '.join(MEASURES)}")
    if command == "page":
        report.write_page(report.saved(MEASURES))
        return 0
    outcomes = measure(names or list(MEASURES), Plan(quick=options.quick))
    if Outcome.BROKEN in outcomes:
        return 1
    return 3 if Outcome.MISSED in outcomes and command == "check" else 0


class Outcome(Enum):
    MET = auto()
    MISSED = auto()
    SKIPPED = auto()
    BROKEN = auto()


def measure(names: list[str], plan: Plan) -> set[Outcome]:
    """Measure, print, and unless it was quick keep the results and write the page."""
    outcomes = set()
    for name in names:
        before = _load_average()
        try:
            result = MEASURES[name](plan)
        except MissingError as missing:
            print(f"{name}: skipped, because there is no {missing}\n", flush=True)
            outcomes.add(Outcome.SKIPPED)
            continue
        except Exception as failure:  # noqa: BLE001 - whatever it died of, the others go on
            print(f"{name}: FAILED: {failure!r}\n", flush=True)
            outcomes.add(Outcome.BROKEN)
            continue
        found = report.as_json(name, _about(name), result, plan, (before, _load_average()))
        print("\n".join(report.lines(found)), f"\n  load average {before} before\n", flush=True)
        is_met = all(report.is_met(bar, quick=plan.quick) for bar in found["bars"])
        outcomes.add(Outcome.MET if is_met else Outcome.MISSED)
        if not plan.quick:
            report.save(found)
    if not plan.quick:
        report.write_page(report.saved(MEASURES))
    return outcomes


def _about(name: str) -> str:
    return (MEASURES[name].__doc__ or "").splitlines()[0]


def _load_average() -> str:
    return Path("/proc/loadavg").read_text().split()[0]


if __name__ == "__main__":
    sys.exit(main())
