"""Everything that this course measures, in order of worth, on one machine; it goes on where it stopped.

For a machine that is yours for an hour, in calls of ten minutes: python -m benchmarks --minutes 9 --out DIR, again
and again until it says that all is done. DIR has to outlast the calls. --scale tiny tries everything out.
"""

import sys

from benchmarks import (
    attention,
    batch,
    compile,
    day,
    finder,
    ladder,
    loading,
    memory,
    notebooks,
    overhead,
    precision,
    trace,
)

PARTS = {
    "precision": precision.items,
    **ladder.PARTS,
    "batch": batch.items,
    "memory": memory.items,
    "compile": compile.items,
    "compile-modes": compile.modes,
    "loading": loading.items,
    "finder": finder.items,
    "attention": attention.items,
    "overhead": overhead.items,
    "trace": trace.items,
    "notebooks": notebooks.items,
}

if __name__ == "__main__":
    sys.exit(day.main(PARTS, __doc__))
