"""Runs PyTorch's DDP tests on the CPU, against PyTorch's class and gradwire's.

For example: python -m tests.conformance --against gradwire --world-size 4 --tests test_ddp_create_graph --verbose
"""

import argparse
import itertools
import sys
from collections import Counter
from pathlib import Path

# In place of the checkout, whose folders `hooks` and `kernels` other packages might be mistaken for.
sys.path[0] = str(Path(__file__).parent)

import ranks  # noqa: E402
import record  # noqa: E402


def main():
    options = parse_arguments()
    rows, reasons, failures = {}, {}, 0
    for against, world_size in itertools.product(options.against, options.world_size):
        column, counts = record.column(against, world_size), Counter()
        with ranks.Suite(against, world_size) as tests:
            for name in options.tests or tests.names:
                outcome = tests.run(name, options.limit)
                failures += outcome.result in (ranks.FAILED, ranks.TIMED_OUT)
                counts[outcome.result] += 1
                rows.setdefault(name, {"test": name})[column] = outcome.result
                reasons[name] = outcome.reason or reasons.get(name, "")
                seconds = f"{outcome.seconds:5.1f} s"
                print(f"{column:10}  {outcome.result:9}  {seconds}  {name}  {outcome.reason}", flush=True)
                if options.verbose and outcome.details:
                    print(outcome.details, flush=True)
        print(f"{column} ranks: {', '.join(f'{count} {result}' for result, count in counts.items())}", flush=True)
    table = [{**row, "reason": reasons[name]} for name, row in rows.items()]
    if len(table[0]) > 3:
        print_table(table)
    if options.record:
        record.write(table)
    return failures > 0


def parse_arguments():
    parser = argparse.ArgumentParser(prog="python -m tests.conformance", description=__doc__.splitlines()[0])
    parser.add_argument("--tests", type=lambda names: names.split(","), metavar="NAME[,NAME]", help="default: all")
    parser.add_argument(
        "--against", nargs="+", choices=record.AGAINST, default=["gradwire"], help="whose class to test (gradwire)"
    )
    parser.add_argument("--world-size", nargs="+", type=int, default=[2], metavar="N", help="number of ranks (2)")
    parser.add_argument("--all", action="store_true", help="both classes, 2 and 4 ranks")
    parser.add_argument("--record", action="store_true", help="all tests of --all, written to the record")
    parser.add_argument(
        "--limit", type=float, default=ranks.LIMIT, metavar="SECONDS", help=f"of one test ({ranks.LIMIT:g})"
    )
    parser.add_argument("--verbose", action="store_true", help="tracebacks and output of ranks that failed or hung")
    options = parser.parse_args()
    if options.all or options.record:
        options.against, options.world_size = record.AGAINST, record.WORLD_SIZES
    if options.record and options.tests:
        parser.error("a record has all tests, so --record does not go with --tests")
    return options


def print_table(rows):
    widths = {key: max(len(key), *(len(row.get(key, "")) for row in rows)) for key in rows[0]}
    for row in ({key: key for key in widths}, *rows):
        print("  ".join(f"{row.get(key, ''):{width}}" for key, width in widths.items()).rstrip())


if __name__ == "__main__":
    sys.exit(main())
