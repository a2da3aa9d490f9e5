"""Everything that this course measures, most useful first, on one machine; a new call goes on where the last stopped.

On a machine that is yours for an hour, in calls of ten minutes, repeat python -m benchmarks --minutes 9 --out DIR
until it says that all is done. DIR has to outlast the calls. --scale tiny tries everything out.
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
