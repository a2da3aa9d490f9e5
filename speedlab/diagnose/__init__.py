"""What bounds a training step, what would help it, in which order and by how much at most; and the proof."""

from speedlab.diagnose.counting import Counts, counts
from speedlab.diagnose.jobs import DiagnoseError, Job, from_lightning, from_transformers, load
from speedlab.diagnose.report import Diagnosis, diagnose
from speedlab.diagnose.rules import RULES, WORTH, Advice, Device, Rule, advise, estimate

__all__ = ["RULES", "WORTH", "Advice", "Counts", "Device", "DiagnoseError", "Diagnosis", "Job", "Rule", "advise",
           "counts", "diagnose", "estimate", "from_lightning", "from_transformers", "load"]  # fmt: skip
